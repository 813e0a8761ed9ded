"""How each kind of cluster is given a driver: the command, its configuration, its environment. Pure functions.

A Python application in cluster mode is refused by ``spark-submit`` for a standalone master, so there the main class is
Spark's own `PythonRunner`, whose "jar" is the zip of rankzero (SPARK standalone `DriverWrapper` fetches it, and starts
the class). On YARN Spark uploads both files. On Kubernetes they come with the run's Secret.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankzero.engines.spark.conf import is_kubernetes, is_standalone
from rankzero.engines.spark.jvm import PYTHON
from rankzero.errors import InvalidJobError
from rankzero.masking import is_secret

PROGRAM, CODE, PRIVATE = "driver.py", "rankzero.jar", "private"
"""Names of the three things that a driver in a cluster is given: its main program, rankzero itself, what is secret.

The code is a zip that Python imports from; Spark wants the "jar" of a driver to be called one.
"""

SECRET_DIRECTORY = "/opt/rankzero"
"""Where a driver on Kubernetes finds them."""

PRIVATE_VARIABLE = "SPARK_RANKZERO_PRIVATE"
"""Of a driver's process on a standalone cluster. Spark passes no variable on that is called otherwise."""

PRIVATE_SETTING = "spark.rankzero.secret"
"""On YARN. Spark shows the value of no setting that has this word in its name (``spark.redaction.regex``)."""

LONGEST_VARIABLE = 128 << 10
"""Bytes that Linux lets one variable have."""

ARCHIVES = "spark.archives"
DRIVER_PYTHON = "spark.pyspark.driver.python"

# Read when a SparkContext starts, which the driver does with the whole configuration.
_LATE = ("spark.hadoop.", "spark.executorEnv.")


@dataclass(frozen=True)
class Deployment:
    """What ``spark-submit`` is given.

    Attributes:
        arguments: Behind its own options.
        conf: For its file of properties.
        env: Variables of its process; those of this process come first unless ``bare``.
        bare: It gets no other variables: a standalone cluster would pass them on to the driver.
    """

    arguments: list[str]
    conf: dict[str, str]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    bare: bool = False


@dataclass(frozen=True)
class Submitted:
    """What is to be driven.

    Attributes:
        directory: The run directory.
        submission: Which submission of it.
        name: Of the Spark application.
    """

    directory: str
    submission: int
    name: str


def pack(private: Mapping[str, Any]) -> str:
    """What is private as one word of ASCII."""
    return base64.b64encode(json.dumps(private).encode()).decode()


def unpack(word: str) -> dict[str, Any]:
    """What `pack` has packed."""
    private: dict[str, Any] = json.loads(base64.b64decode(word))
    return private


def deployment(
    master: str, conf: Mapping[str, str], what: Submitted, files: str, private: str, name: str = ""
) -> Deployment:
    """What ``spark-submit`` is given for a kind of cluster.

    Args:
        master: The cluster.
        conf: The user's, on top of spark-defaults.conf.
        what: The run.
        files: Directory with `PROGRAM` and `CODE`: one that every worker sees, for a standalone cluster.
        private: What is secret, packed.
        name: Of the Secret and the driver's pod, on Kubernetes.

    Raises:
        InvalidJobError: it is too much for a variable.
    """
    if is_standalone(master):
        return _standalone(conf, what, files, private)
    if is_kubernetes(master):
        return _kubernetes(conf, what, name)
    return _yarn(conf, what, files, private)


def refuse_paths_of_executors(conf: Mapping[str, str]) -> None:
    """For a standalone cluster, which runs its driver in a directory of its own, and unpacks no archive there.

    Raises:
        InvalidJobError: the driver would not find its Python, or an archive.
    """
    python = conf.get(PYTHON, "")
    if DRIVER_PYTHON not in conf and "/" in python and not python.startswith("/"):
        raise InvalidJobError(
            f"{PYTHON} is {python!r}, and a standalone cluster unpacks archives for executors only: set "
            f"{DRIVER_PYTHON} to a Python that every worker has"
        )
    for archive in filter(None, conf.get(ARCHIVES, "").split(",")):
        if not archive.startswith("/") and "://" not in archive:
            raise InvalidJobError(
                f"{ARCHIVES} has {archive!r}, and the driver on the cluster runs in another directory: give a path "
                "or URL that every worker sees"
            )


def _standalone(conf: Mapping[str, str], what: Submitted, files: str, private: str) -> Deployment:
    if len(PRIVATE_VARIABLE) + len(private) + 2 > LONGEST_VARIABLE:
        raise InvalidJobError(
            f"env and conf take {len(private)} bytes, and a standalone cluster takes no more than {LONGEST_VARIABLE} "
            "of what is private: put what is large into a file that the ranks read"
        )
    program, code = f"{files}/{PROGRAM}", f"{files}/{CODE}"
    arguments = ["--class", "org.apache.spark.deploy.PythonRunner", f"file://{code}", program, code]
    # Its settings are on the command line of the driver, but for the cluster's own secret.
    secret = conf.get("spark.authenticate.secret")
    env = {PRIVATE_VARIABLE: private, **({"_SPARK_AUTH_SECRET": secret} if secret else {})}
    return Deployment([*arguments, *driver_arguments(what, f"env:{PRIVATE_VARIABLE}")], shown(conf), env, bare=True)


def _yarn(conf: Mapping[str, str], what: Submitted, files: str, private: str) -> Deployment:
    # Configuration lies in the staging directory, which is the user's alone, as it always does on YARN.
    settings = {"spark.yarn.submit.waitAppCompletion": "false", **conf, PRIVATE_SETTING: private}
    arguments = ["--py-files", f"{files}/{CODE}", f"{files}/{PROGRAM}"]
    return Deployment([*arguments, *driver_arguments(what, f"conf:{PRIVATE_SETTING}")], settings)


def _kubernetes(conf: Mapping[str, str], what: Submitted, name: str) -> Deployment:
    # What is Kubernetes' own is for spark-submit to read: names of Secrets, and the token that it submits with.
    own = {key: value for key, value in conf.items() if key.startswith("spark.kubernetes.")}
    settings = {
        "spark.kubernetes.submission.waitAppCompletion": "false",
        **shown(conf),
        **own,
        "spark.kubernetes.driver.pod.name": name,
        f"spark.kubernetes.driver.secrets.{name}": SECRET_DIRECTORY,
    }
    inside = f"local://{SECRET_DIRECTORY}"
    arguments = ["--py-files", f"{inside}/{CODE}", f"{inside}/{PROGRAM}"]
    return Deployment([*arguments, *driver_arguments(what, f"file:{SECRET_DIRECTORY}/{PRIVATE}")], settings)


def driver_arguments(what: Submitted, private: str) -> list[str]:
    """Of the program; ``private`` says where it finds what is secret."""
    return [what.directory, "--submission", str(what.submission), "--private", private]


def shown(conf: Mapping[str, str]) -> dict[str, str]:
    """Without what may hold credentials, which the driver's SparkContext gets from what is private."""
    return {name: value for name, value in conf.items() if not (name.startswith(_LATE) or is_secret(name))}
