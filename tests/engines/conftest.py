"""A real standalone cluster of two workers with (faked) GPUs."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import servers

START_TIMEOUT = 60.0


@pytest.fixture(scope="module")
def gpu_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A discovery script that reports one integer and one UUID."""
    script = tmp_path_factory.mktemp("gpus") / "discover.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["3", "GPU-5a1b"]}\'\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory, gpu_script: Path) -> Iterator[str]:
    """A standalone master with two workers of two cores and two GPUs each, from pyspark's spark-class."""
    import pyspark

    home = Path(pyspark.__file__).parent
    logs = tmp_path_factory.mktemp("standalone")
    options = f"-Dspark.worker.resource.gpu.amount=2 -Dspark.worker.resource.gpu.discoveryScript={gpu_script}"
    env = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_OPTS": options,
        "SPARK_WORKER_DIR": str(logs / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
    }

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return servers.start(str(home / "bin" / "spark-class"), *arguments, log=logs / name, env=env)

    def wait_for(name: str, pattern: str, count: int = 1) -> re.Match[str]:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            found = list(re.finditer(pattern, (logs / name).read_text()))
            if len(found) >= count:
                return found[0]
            time.sleep(0.1)
        raise TimeoutError((logs / name).read_text())

    package = "org.apache.spark.deploy"
    master = start("master", f"{package}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    processes = [master]
    try:
        url = wait_for("master", r"spark://127\.0\.0\.1:\d+")[0]
        for number in range(2):
            worker = (f"{package}.worker.Worker", "--host", "127.0.0.1", "--cores", "2", "--memory", "2g")
            processes.append(start(f"worker{number}", *worker, "--webui-port", "0", url))
        wait_for("master", "Registering worker", count=2)
        yield url
    finally:
        servers.stop(processes)
