"""The command, configuration and environment with which each kind of cluster starts a driver.

``spark-submit`` refuses a Python application in cluster mode for a standalone master. So there the main class is
Spark's own `PythonRunner`, whose "jar" is the zip of rankzero: Spark's `DriverWrapper` fetches it, and starts the
class. On YARN Spark uploads both files. On Kubernetes they are in the run's Secret.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankzero.engines.spark.conf import is_kubernetes, is_standalone
from rankzero.engines.spark.jvm import PYTHON
from rankzero.errors import InvalidJobError
from rankzero.masking import is_secret

PROGRAM, CODE, PRIVATE = "driver.py", "rankzero.jar", "private"
"""Names of the three files that a driver in a cluster gets: its main program, rankzero itself, the secrets.

The code is a zip that Python imports; Spark requires a "jar" of a driver to have this ending."""

SECRET_DIRECTORY = "/opt/rankzero"
"""Directory in which a driver on Kubernetes finds them."""

PRIVATE_VARIABLE = "SPARK_RANKZERO_PRIVATE"
"""Variable of a driver's process on a standalone cluster. Spark passes on only variables with such a name."""

PRIVATE_SETTING = "spark.rankzero.secret"
"""Setting with the secrets on YARN. Spark masks settings that have this word in their name
(``spark.redaction.regex``)."""

LONGEST_VARIABLE = 128 << 10
"""Most bytes of one environment variable on Linux."""

ARCHIVES = "spark.archives"
DRIVER_PYTHON = "spark.pyspark.driver.python"

# These settings are read when a SparkContext starts. The driver starts it with the whole configuration.
_LATE = ("spark.hadoop.", "spark.executorEnv.")


@dataclass(frozen=True)
class Deployment:
    """The input of ``spark-submit``.

    Attributes:
        arguments: Arguments behind its own options.
        conf: Settings for its file of properties.
        env: Variables of its process, in addition to those of this process unless ``bare``.
        bare: True if its process gets no other variables, which a standalone cluster would pass on to the driver.
    """

    arguments: list[str]
    conf: dict[str, str]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    bare: bool = False


@dataclass(frozen=True)
class Submitted:
    """The submission that a cluster's driver drives.

    Attributes:
        directory: The run directory.
        submission: Number of the submission.
        name: Name of the Spark application.
    """

    directory: str
    submission: int
    name: str


def pack(private: Mapping[str, Any]) -> str:
    """Returns the private data as one word of ASCII."""
    return base64.b64encode(json.dumps(private).encode()).decode()


def unpack(word: str) -> dict[str, Any]:
    """Returns the private data from the word that `pack` made."""
    private: dict[str, Any] = json.loads(base64.b64decode(word))
    return private


def read_private(place: str) -> dict[str, Any]:
    """Reads the private data, in the process of a driver, from the place that `driver_arguments` names."""
    kind, _, name = place.partition(":")
    if kind == "env":
        # Child processes of this one must not inherit it.
        return unpack(os.environ.pop(name))
    if kind == "file":
        with open(name) as file:
            return unpack(file.read())
    from pyspark import SparkContext

    gateway: Any = SparkContext
    gateway._ensure_initialized()
    # The application's SparkContext must not keep it either.
    return unpack(str(gateway._jvm.java.lang.System.clearProperty(name)))


def deployment(
    master: str, conf: Mapping[str, str], what: Submitted, files: str, private: str, name: str = ""
) -> Deployment:
    """Returns the input of ``spark-submit`` for a kind of cluster.

    Args:
        master: The cluster.
        conf: The user's settings, together with those of spark-defaults.conf.
        what: The run.
        files: Directory with `PROGRAM` and `CODE`; for a standalone cluster, one that every worker sees.
        private: The secrets, packed.
        name: Name of the Secret and the driver's pod, on Kubernetes.

    Raises:
        InvalidJobError: the secrets are too long for a variable.
    """
    if is_standalone(master):
        return _standalone(conf, what, files, private)
    if is_kubernetes(master):
        return _kubernetes(conf, what, name)
    return _yarn(conf, what, files, private)


def refuse_paths_of_executors(conf: Mapping[str, str]) -> None:
    """Refuses relative paths for a standalone cluster, which starts its driver in a directory without the archives.

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
            "bytes of private data: put large values into a file that the ranks read"
        )
    program, code = f"{files}/{PROGRAM}", f"{files}/{CODE}"
    arguments = ["--class", "org.apache.spark.deploy.PythonRunner", f"file://{code}", program, code]
    # The driver gets its settings on its command line, except the cluster's own secret.
    secret = conf.get("spark.authenticate.secret")
    env = {PRIVATE_VARIABLE: private, **({"_SPARK_AUTH_SECRET": secret} if secret else {})}
    return Deployment([*arguments, *driver_arguments(what, f"env:{PRIVATE_VARIABLE}")], shown(conf), env, bare=True)


def _yarn(conf: Mapping[str, str], what: Submitted, files: str, private: str) -> Deployment:
    # YARN keeps the configuration in the staging directory, which only this user can read.
    settings = {"spark.yarn.submit.waitAppCompletion": "false", **conf, PRIVATE_SETTING: private}
    arguments = ["--py-files", f"{files}/{CODE}", f"{files}/{PROGRAM}"]
    return Deployment([*arguments, *driver_arguments(what, f"conf:{PRIVATE_SETTING}")], settings)


def _kubernetes(conf: Mapping[str, str], what: Submitted, name: str) -> Deployment:
    # spark-submit reads the settings of Kubernetes itself: names of Secrets, and the token that it submits with.
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
    """Returns the arguments of the driver's program; ``private`` is the location of the secrets."""
    return [what.directory, "--submission", str(what.submission), "--private", private]


def shown(conf: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings without credentials; the driver's SparkContext gets those from the secrets."""
    return {name: value for name, value in conf.items() if not (name.startswith(_LATE) or is_secret(name))}
