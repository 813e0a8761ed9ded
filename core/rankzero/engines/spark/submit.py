"""`SparkSubmitEngine`: a `SparkEngine` whose driver runs on the cluster, so that the run outlives its submitter."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rankzero import bounds, store
from rankzero.engines.spark import deploy
from rankzero.engines.spark.conf import is_kubernetes, is_standalone, spark_defaults, spark_home
from rankzero.engines.spark.context import zipped_packages
from rankzero.engines.spark.deploy import CODE, PRIVATE, PROGRAM, Deployment, Submitted
from rankzero.engines.spark.engine import SparkEngine
from rankzero.engines.spark.jvm import find_java
from rankzero.errors import EngineError, InvalidJobError
from rankzero.job import Job

if TYPE_CHECKING:
    from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

_TAIL = 12
"""Lines of the output of ``spark-submit`` that an error shows."""

_PROGRAM = "from rankzero.driver.main import main_on_cluster\n\nmain_on_cluster()\n"


@dataclass(frozen=True)
class SparkSubmitEngine(SparkEngine):
    """Runs the ranks as one barrier stage of a Spark cluster, and the driver of the run on that cluster, too.

    The run does not need the machine that submits it any more, so a pod of an orchestrator may end. Any process that
    sees the run directory can follow the run, cancel it and get its result. So the store must be one that the cluster
    sees.

    Attributes:
        master: ``spark://host:port``, ``yarn`` or ``k8s://...``.
        conf: Spark configuration. Settings that may hold credentials travel separately: see docs/clusters.md.
        session: Must be None, because the driver has the session.

    Raises:
        InvalidJobError: the master has another form, or conf has values that are not strings.

    Example:
        >>> from rankzero import Launcher, SparkSubmitEngine
        >>> engine = SparkSubmitEngine("spark://head:7077", conf={"spark.driver.memory": "2g"})
        >>> handle = Launcher(8, engine=engine, store="/shared/runs").submit(train)    # doctest: +SKIP
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.session is not None:
            raise InvalidJobError("a driver in the cluster has a session of its own: give master= and conf=")
        if self.master is None or self.master.startswith("local"):
            raise InvalidJobError(
                f"master {self.master!r} is no cluster that could run a driver: use spark://host:port, yarn or k8s://..."
            )

    @property
    def drives_elsewhere(self) -> bool:
        """True, since the cluster runs the driver."""
        return True

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the specification of a `SparkEngine` whose driver a cluster starts."""
        shown, private = super().to_spec()
        return {**shown, "deploy_mode": "cluster"}, private

    def check(self, job: Job) -> None:
        """Refuses a job that a `SparkEngine` refuses, and a cluster to which this machine cannot submit."""
        super().check(job)
        if is_standalone(self.master or ""):
            deploy.refuse_paths_of_executors(self._settings())
        if is_kubernetes(self.master or ""):
            from rankzero.engines.spark import kubernetes

            kubernetes.require_client()
            if "spark.kubernetes.container.image" not in self._settings() and not any(
                f"spark.kubernetes.{role}.container.image" in self._settings() for role in ("driver", "executor")
            ):
                raise InvalidJobError(
                    "conf has no spark.kubernetes.container.image: name an image with Spark and torch"
                )

    def check_store(self, root: str) -> None:
        """Refuses a store that the cluster cannot see."""
        if root.startswith("memory://"):
            raise InvalidJobError(
                f"the store {root!r} exists only in this process, and the driver runs on {self.master}"
            )
        if is_standalone(self.master or "") and store.is_url(root):
            raise InvalidJobError(
                f"a driver on the standalone cluster {self.master!r} is started from the run directory, so the store "
                f"must be a path that every worker mounts, not {root!r}"
            )

    def start_driver(self, run: RunDirectory, private: Mapping[str, Any]) -> None:
        """Submits the driver, and returns when the cluster has accepted it, which takes about ten seconds."""
        job, master = run.job(), self.master or ""
        what = Submitted(run.directory, job.submission, f"rankzero {job.name}")
        files = {PROGRAM: _PROGRAM.encode(), CODE: zipped_packages()}
        bound = min(bounds.SPARK_SUBMIT_TIMEOUT, job.start_timeout)
        private = {**private, "token": run.token()}
        word = deploy.pack(private)
        if is_kubernetes(master):
            from rankzero.engines.spark import kubernetes

            name = kubernetes.name_of(job.run_id)
            secret = kubernetes.Secret(master, self._settings(), name)
            deployment = deploy.deployment(master, self._settings(), what, "", "", name)
            with secret.created({**files, PRIVATE: word.encode()}):
                self._spark_submit(run, what, deployment, bound)
            secret.leave_to_pod()
            return
        with _placed(run, job.submission, files, shared=is_standalone(master)) as directory:
            deployment = deploy.deployment(master, self._settings(), what, directory, word)
            self._spark_submit(run, what, deployment, bound)

    def _settings(self) -> dict[str, str]:
        return {**spark_defaults(), **self.conf}

    def _spark_submit(self, run: RunDirectory, what: Submitted, deployment: Deployment, bound: float) -> None:
        with tempfile.NamedTemporaryFile("w", prefix="rankzero-", suffix=".conf") as properties, _log_of(run) as log:
            properties.write(_lines(deployment.conf))
            properties.flush()
            command = [*_submit_command(bare=deployment.bare), "--master", self.master or ""]
            command += ["--deploy-mode", "cluster", "--name", what.name, "--properties-file", properties.name]
            command += deployment.arguments
            env = {**({} if deployment.bare else os.environ), **deployment.env}
            start = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
            try:
                code = _await_driver(process, run, what.submission, bound)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if code is None:
                raise EngineError(_problem(self.master, f"did not answer within {bound:g} s", log, start))
            if code:
                raise EngineError(_problem(self.master, "did not take the driver", log, start))


def _await_driver(process: subprocess.Popen[bytes], run: RunDirectory, submission: int, bound: float) -> int | None:
    """Returns the exit code of spark-submit, or 0 once the driver has begun; None if neither happens in time."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(bounds.POLL_INTERVAL_LONG)
        # On a standalone cluster spark-submit itself waits for five seconds for the driver to fail.
        if run.has_driver(submission):
            return 0
    return None


def _problem(master: str | None, what: str, log: IO[bytes], start: int) -> str:
    log.seek(start)
    lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if not re.match(r"\s+at ", line)]
    return "\n".join([f"the cluster {master!r} {what}; spark-submit wrote:", *(f"  {line}" for line in lines[-_TAIL:])])


def _submit_command(*, bare: bool) -> list[str]:
    """Returns the command ``spark-submit``; the bare form avoids its scripts, which need environment variables."""
    home = spark_home()
    if not bare:
        return [os.path.join(home, "bin", "spark-submit")]
    java = os.path.join(find_java() or "", "bin", "java")
    return [java, "-cp", os.path.join(home, "jars", "*"), "-Xmx256m", "org.apache.spark.deploy.SparkSubmit"]


@contextlib.contextmanager
def _placed(run: RunDirectory, submission: int, files: Mapping[str, bytes], *, shared: bool) -> Iterator[str]:
    """Yields a directory with the driver's program and code: inside the run directory, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="rankzero-") as temporary:
        directory = run.submission_path(submission) if shared else temporary
        for name, data in files.items():
            store.write_bytes(store.join(directory, name), data)
        yield directory


def _log_of(run: RunDirectory) -> IO[bytes]:
    """Opens the log for the output of spark-submit; for a local store the driver's own log file."""
    if run.is_remote:
        return tempfile.TemporaryFile()
    return open(run.path("driver.log"), "a+b")


def _lines(conf: Mapping[str, str]) -> str:
    """Returns the content of a file of properties."""
    return "".join(f"{name} {_escaped(value)}\n" for name, value in conf.items())


def _escaped(value: str) -> str:
    """Returns a value with the escapes of Java's properties files."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
