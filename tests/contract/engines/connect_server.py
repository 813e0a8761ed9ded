"""A Spark Connect server in a process of its own, from pyspark's jars."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import servers
from tests.conftest import free_port, until

START_TIMEOUT = 240.0
# From a port of this network, by a socket in the file system, to a port of another one: a way in, and none out.
BRIDGE = """
import asyncio, contextlib, sys
side, unix, port = sys.argv[1:]

async def copy(reader, writer):
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()

async def join(reader, writer):
    far = asyncio.open_connection("127.0.0.1", int(port)) if side == "in" else asyncio.open_unix_connection(unix)
    far_reader, far_writer = await far
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

async def main():
    inner = side == "in"
    serve = asyncio.start_unix_server(join, unix) if inner else asyncio.start_server(join, "127.0.0.1", int(port))
    await (await serve).serve_forever()

asyncio.run(main())
"""
STARTED = "Spark Connect server started"


class ConnectServer:
    """A server on this host that is ready.

    Attributes:
        host: Its address.
        port: Where it listens.
        url: ``sc://host:port``.
        process: Its JVM's.
    """

    def __init__(self, log: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.host, self.port = "127.0.0.1", port
        self.url = f"sc://{self.host}:{port}"
        self.process = process
        until(lambda: STARTED in log.read_text() or process.poll() is not None, START_TIMEOUT, f"a server ({log})")
        assert process.poll() is None, log.read_text()[-2000:]


def command(home: Path, port: int, master: str) -> list[str]:
    """What starts one in the foreground."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    return [str(home / "bin" / "spark-submit"), "--master", master, *options, *server]


@contextlib.contextmanager
def connect_server(
    directory: Path,
    master: str = "local[4]",
    *,
    hidden: Path | None = None,
    apart: bool = False,
    port: int | None = None,
    python: str = sys.executable,
) -> Iterator[ConnectServer]:
    """One until the end of the block.

    Args:
        directory: Where it runs, and writes its log.
        master: Its own.
        hidden: A directory that the server and its executors see empty. Needs root.
        apart: In a network of its own, from which nothing of this host's can be reached. Needs root.
        port: Where it listens; None takes a free one.
        python: Of its executors.
    """
    import pyspark

    home, port, log = Path(pyspark.__file__).parent, port or free_port(), directory / "connect.log"
    env = {"PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1", **os.environ, "SPARK_HOME": str(home)}
    hide = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs '{hidden}' && exec \"$@\"", "sh"] if hidden else []
    network = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if apart else []
    process = servers.start(*network, *hide, *command(home, port, master), log=log, env=env, cwd=directory)
    started = [process]
    try:
        server = ConnectServer(log, port, process)
        if apart:
            # Found by the server: what `env` and `setpriv` exec into has the id of the process.
            enter = ["nsenter", "--target", str(process.pid), "--net"]
            unix = directory / "bridge"
            started.append(servers.start(*enter, sys.executable, "-c", BRIDGE, "in", str(unix), str(port), log=log))
            until(unix.exists, START_TIMEOUT, "one end of the bridge")
            started.append(servers.start(sys.executable, "-c", BRIDGE, "out", str(unix), str(port), log=log))
            until(lambda: accepts(port), START_TIMEOUT, "the other end")
        yield server
    finally:
        servers.stop(started)


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
