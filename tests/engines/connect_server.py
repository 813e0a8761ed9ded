"""A Spark Connect server in a process of its own, from pyspark's jars."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import servers
from tests.conftest import free_port, until

START_TIMEOUT = 90.0
STARTED = "Spark Connect server started"


class ConnectServer:
    """A server on this host that is ready.

    Attributes:
        url: ``sc://host:port``.
        process: Its JVM's.
    """

    def __init__(self, log: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url = f"sc://127.0.0.1:{port}"
        self.process = process
        until(lambda: STARTED in log.read_text() or process.poll() is not None, START_TIMEOUT, f"a server ({log})")
        assert process.poll() is None, log.read_text()[-2000:]


def command(home: Path, port: int, master: str, conf: dict[str, str], address: str = "127.0.0.1") -> list[str]:
    """What starts one in the foreground."""
    settings = {
        "spark.connect.grpc.binding.address": address,
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        **conf,
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    return [str(home / "bin" / "spark-submit"), "--master", master, *options, *server]


@contextlib.contextmanager
def connect_server(directory: Path, master: str = "local[4]", **conf: str) -> Iterator[ConnectServer]:
    """One until the end of the block; ``_`` stands for ``.`` in the names of settings, which begin with ``spark.``."""
    import pyspark

    home, port, log = Path(pyspark.__file__).parent, free_port(), directory / "connect.log"
    env = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **os.environ, "SPARK_HOME": str(home)}
    named = {f"spark.{name.replace('_', '.')}": value for name, value in conf.items()}
    process = servers.start(*command(home, port, master, named), log=log, env=env, cwd=directory)
    try:
        yield ConnectServer(log, port, process)
    finally:
        servers.stop([process])
