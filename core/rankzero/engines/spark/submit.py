"""`SparkSubmitEngine`: a `SparkEngine` whose driver runs on the cluster, so that the run outlives its submitter.

``spark-submit`` refuses a Python application in cluster mode for a standalone master. So there the main class is
Spark's own `PythonRunner`, whose "jar" is the zip of rankzero: Spark's `DriverWrapper` fetches it, and starts the
class. On YARN Spark uploads both files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from rankzero import bounds, store
from rankzero.engines.spark.conf import spark_defaults, spark_home
from rankzero.engines.spark.context import zipped_packages
from rankzero.engines.spark.engine import SparkEngine
from rankzero.engines.spark.jvm import find_java
from rankzero.errors import EngineError, InvalidJobError
from rankzero.masking import is_secret
from rankzero.run.directory import DRIVER_LOG

if TYPE_CHECKING:
    from rankzero.run.directory import Submission

SPARK_SUBMIT_TIMEOUT = bounds.stretched(180.0)  # To start a JVM, upload the files and get the driver accepted

PROGRAM, CODE = "driver.py", "rankzero.jar"  # A driver's program, and rankzero as a zip: Spark requires this ending

PRIVATE_VARIABLE = "SPARK_RANKZERO_PRIVATE"
"""Variable of a driver's process on a standalone cluster. Spark passes on only variables with such a name."""

PRIVATE_SETTING = "spark.rankzero.secret"  # On YARN: Spark masks names with this word (``spark.redaction.regex``)

LONGEST_VARIABLE = 128 << 10  # Bytes of an environment variable on Linux

# These settings are read when a SparkContext starts. The driver starts it with the whole configuration.
_LATE = ("spark.hadoop.", "spark.executorEnv.")

_TAIL = 12  # Lines of the output of ``spark-submit`` that an error shows

_PROGRAM = "from rankzero.driver.main import main_on_cluster\n\nmain_on_cluster()\n"


@dataclass(frozen=True)
class SparkSubmitEngine(SparkEngine):
    """Runs the ranks as one barrier stage of a Spark cluster, and the driver of the run on that cluster, too.

    The run does not need the machine that submits it any more, so a pod of an orchestrator may end. Any process that
    sees the run directory can follow the run, cancel it and get its result. So the store must be one that the cluster
    sees.

    Attributes:
        master: ``spark://host:port`` or ``yarn``.
        conf: Spark configuration. Settings that may hold credentials travel separately: see docs/clusters.md.
        session: Must be None, because the driver has the session.

    Raises:
        InvalidJobError: the master has another form, or conf has values that are not strings.

    Example:
        >>> from rankzero import Launcher, SparkSubmitEngine
        >>> engine = SparkSubmitEngine("spark://head:7077", conf={"spark.driver.memory": "2g"})
        >>> handle = Launcher(8, engine=engine, store="/shared/runs").submit(train)    # doctest: +SKIP
    """

    drives_elsewhere = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.session is not None or self.master is None or self.master.startswith("local"):
            raise InvalidJobError(
                f"master {self.master!r} is no cluster that could run a driver, which has a session of its own: give "
                "spark://host:port or yarn, and conf="
            )
        if self.master.startswith("k8s://"):
            raise InvalidJobError(
                f"rankzero starts no driver in cluster mode on {self.master!r}: start a pod of your own that runs "
                f"Launcher(engine=SparkEngine({self.master!r}, conf=...), run_id=..., store=...), with "
                "spark.driver.host set to the pod's address, and attach to the run by its directory (docs/clusters.md "
                "has a manifest)"
            )

    @property
    def _is_standalone(self) -> bool:
        return str(self.master).startswith("spark://")

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the specification of a `SparkEngine` whose driver a cluster starts."""
        shown, private = super().to_spec()
        return {**shown, "deploy_mode": "cluster"}, private

    def check_store(self, root: str) -> None:
        """Refuses a store that the cluster cannot see."""
        if root.startswith("memory://") or (self._is_standalone and store.is_url(root)):
            raise InvalidJobError(
                f"the driver on {self.master!r} cannot be started from the store {root!r}: give a path that every host "
                "mounts, or on YARN the URL of an object store"
            )

    def start_driver(self, own: Submission, private: Mapping[str, Any]) -> None:
        """Submits the driver, and returns when the cluster has accepted it, which takes about ten seconds."""
        master, run = self.master or "", [own.run.directory, str(own.job.submission)]
        with _placed(own, shared=self._is_standalone) as files:
            self._spark_submit(own, deployment_of(master, self._settings(), files, run, pack(private)))

    def _settings(self) -> dict[str, str]:
        return {**spark_defaults(), **self.conf}

    def _spark_submit(self, own: Submission, deployment: Deployment) -> None:
        job = own.job
        bound = min(SPARK_SUBMIT_TIMEOUT(), job.start_timeout)
        with tempfile.NamedTemporaryFile("w", prefix="rankzero-", suffix=".conf") as properties, _log_of(own) as log:
            properties.write(_lines(deployment.conf))
            properties.flush()
            command = [*_submit_command(bare=deployment.env is not None), "--master", self.master or ""]
            command += ["--deploy-mode", "cluster", "--name", f"rankzero {job.name}"]
            command += ["--properties-file", properties.name, *deployment.arguments]
            start = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=deployment.env)
            try:
                code = _await_driver(process, own, bound)
            finally:
                process.kill()
                process.wait()
            if code != 0:
                log.seek(start)
                lines = log.read().decode("utf-8", "replace").splitlines()
                tail = [f"  {line}" for line in lines if not re.match(r"\s+at ", line)][-_TAIL:]
                what = "did not take the driver" if code else f"did not answer within {bound:g} s"
                raise EngineError("\n".join([f"the cluster {self.master!r} {what}; spark-submit wrote:", *tail]))


@dataclass(frozen=True)
class Deployment:
    """The input of ``spark-submit``.

    Attributes:
        arguments: Arguments behind its own options.
        conf: Settings for its file of properties.
        env: All variables of its process; None if it inherits those of this process.
    """

    arguments: list[str]
    conf: dict[str, str]
    env: dict[str, str] | None = field(default=None, repr=False)


def deployment_of(master: str, conf: Mapping[str, str], files: str, run: list[str], private: str) -> Deployment:
    """Returns the input of ``spark-submit`` for a kind of cluster.

    Args:
        master: The cluster.
        conf: The user's settings, together with those of spark-defaults.conf.
        files: Directory with `PROGRAM` and `CODE`; for a standalone cluster, one that every worker sees.
        run: The run directory and the number of the submission.
        private: The secrets, packed.

    Raises:
        InvalidJobError: the secrets are too long for a variable.
    """
    program, code = f"{files}/{PROGRAM}", f"{files}/{CODE}"
    own = [run[0], "--submission", run[1], "--private"]
    if not master.startswith("spark://"):
        # YARN keeps the configuration in the staging directory, which only this user can read.
        settings = {"spark.yarn.submit.waitAppCompletion": "false", **conf, PRIVATE_SETTING: private}
        return Deployment(["--py-files", code, program, *own, f"conf:{PRIVATE_SETTING}"], settings)
    if len(PRIVATE_VARIABLE) + len(private) + 2 > LONGEST_VARIABLE:
        raise InvalidJobError(
            f"env and conf take {len(private)} bytes, and a standalone cluster takes no more than {LONGEST_VARIABLE} "
            "bytes of private data: put large values into a file that the ranks read"
        )
    arguments = ["--class", "org.apache.spark.deploy.PythonRunner", f"file://{code}", program, code]
    # The driver gets its settings on its command line. So credentials travel apart, the cluster's own secret as well.
    shown = {name: value for name, value in conf.items() if not (name.startswith(_LATE) or is_secret(name))}
    secret = conf.get("spark.authenticate.secret")
    env = {PRIVATE_VARIABLE: private, **({"_SPARK_AUTH_SECRET": secret} if secret else {})}
    # A standalone cluster passes all variables of spark-submit on to the driver.
    return Deployment([*arguments, *own, f"env:{PRIVATE_VARIABLE}"], shown, env)


def pack(private: Mapping[str, Any]) -> str:
    """Returns the private data as one word of ASCII."""
    return base64.b64encode(json.dumps(private).encode()).decode()


def read_private(place: str) -> dict[str, Any]:
    """Reads the private data, in the process of a driver, from the place that its command line names."""
    kind, _, name = place.partition(":")
    if kind == "env":
        # Child processes of this one must not inherit it.
        word = os.environ.pop(name)
    else:
        from pyspark import SparkContext

        gateway: Any = SparkContext
        gateway._ensure_initialized()
        # The application's SparkContext must not keep it either.
        word = str(gateway._jvm.java.lang.System.clearProperty(name))
    private: dict[str, Any] = json.loads(base64.b64decode(word))
    return private


def _await_driver(process: subprocess.Popen[bytes], own: Submission, bound: float) -> int | None:
    """Returns the exit code of spark-submit, or 0 once the driver has begun; None if neither happens in time."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(bounds.POLL_INTERVAL_LONG)
        # On a standalone cluster spark-submit itself waits for five seconds for the driver to fail.
        if own.has_driver():
            return 0
    return None


def _submit_command(*, bare: bool) -> list[str]:
    """Returns the command ``spark-submit``; the bare form avoids its scripts, which need environment variables."""
    home = spark_home()
    if not bare:
        return [os.path.join(home, "bin", "spark-submit")]
    java = os.path.join(find_java() or "", "bin", "java")
    return [java, "-cp", os.path.join(home, "jars", "*"), "-Xmx256m", "org.apache.spark.deploy.SparkSubmit"]


@contextlib.contextmanager
def _placed(own: Submission, *, shared: bool) -> Iterator[str]:
    """Yields a directory with the driver's program and code: the submission's own, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="rankzero-") as temporary:
        directory = own.directory if shared else temporary
        for name, data in {PROGRAM: _PROGRAM.encode(), CODE: zipped_packages()}.items():
            store.write_bytes(store.join(directory, name), data)
        yield directory


def _log_of(own: Submission) -> IO[bytes]:
    """Opens the log for the output of spark-submit; for a local store the driver's own log file."""
    if own.is_remote:
        return tempfile.TemporaryFile()
    return open(own.path(DRIVER_LOG), "a+b")


def _lines(conf: Mapping[str, str]) -> str:
    """Returns the content of a file of properties, with the escapes of Java's."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})
    return "".join(f"{name} {value.translate(escapes)}\n" for name, value in conf.items())
