"""A real standalone cluster of two workers with (faked) GPUs."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import servers
from tests.conftest import until

START_TIMEOUT = 240.0


@pytest.fixture(scope="session")
def gpu_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A discovery script that reports one integer and one UUID."""
    script = tmp_path_factory.mktemp("gpus") / "discover.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["3", "GPU-5a1b"]}\'\n')
    script.chmod(0o755)
    return script


class Standalone:
    """A master and its workers, from pyspark's spark-class."""

    def __init__(self, logs: Path, gpu_script: Path, **settings: str) -> None:
        import pyspark

        self._home = Path(pyspark.__file__).parent
        self.logs = logs
        self._gpus = f"-Dspark.worker.resource.gpu.amount=2 -Dspark.worker.resource.gpu.discoveryScript={gpu_script}"
        self._settings = " ".join(f"-D{name.replace('_', '.')}={value}" for name, value in settings.items())
        self.workers: list[subprocess.Popen[bytes]] = []
        options = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        self.master = self._start("master", "org.apache.spark.deploy.master.Master", *options)

    def await_master(self) -> str:
        """Its URL."""
        self.url = self._wait_for("master", r"spark://127\.0\.0\.1:\d+")[0]
        return self.url

    def add_worker(self) -> subprocess.Popen[bytes]:
        """Starts one with two cores and two GPUs."""
        number = len(self.workers) + 1
        options = ("--host", "127.0.0.1", "--cores", "2", "--memory", "2g", "--webui-port", "0", self.url)
        self.workers.append(self._start(f"worker{number}", "org.apache.spark.deploy.worker.Worker", *options))
        return self.workers[-1]

    def await_workers(self) -> None:
        """Until the master knows all of them."""
        self._wait_for("master", "Registering worker", count=len(self.workers))

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "SPARK_WORKER_OPTS": self._gpus,
            "SPARK_DAEMON_JAVA_OPTS": self._settings,
            "SPARK_WORKER_DIR": str(self.logs / "work" / name),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        return servers.start(str(self._home / "bin" / "spark-class"), *arguments, log=self.logs / name, env=env)

    def _wait_for(self, name: str, pattern: str, count: int = 1) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            found = list(re.finditer(pattern, (self.logs / name).read_text()))
            return found[0] if len(found) >= count else None

        return until(look, START_TIMEOUT, f"{pattern} in the log of {name}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, gpu_script: Path) -> Iterator[Standalone]:
    """A standalone cluster of two workers, with two cores and two GPUs each."""
    cluster = Standalone(tmp_path_factory.mktemp("standalone"), gpu_script)
    try:
        cluster.await_master()
        for _ in range(2):
            cluster.add_worker()
        cluster.await_workers()
        yield cluster
    finally:
        servers.stop([cluster.master, *cluster.workers])


@pytest.fixture
def standalone(cluster: Standalone) -> str:
    """The master's URL."""
    return cluster.url
