"""What encryption costs: a file through the channel, both ways, and a launch; with and without, taking turns.

Agent and driver are two processes of this machine, which share its cores: between two hosts each has its own.

Run: ``python benchmarks/encryption.py [megabytes]``.
"""

import asyncio
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from typing import Any

from measure import Report, timed

from rankzero import Launcher
from rankzero.channel import messages
from rankzero.channel.connection import Driver, new_secret
from rankzero.channel.server import Server
from rankzero.channel.tls import make_identity
from rankzero.host.network import listen

MEGABYTES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 256
RUNS = 5


def agent(port: int, secret: str, certificate: bytes | None, directory: str) -> None:
    """Sends the file, then fetches it."""

    async def work() -> None:
        driver = Driver(["127.0.0.1"], port, secret, certificate)
        connection = await driver.find(0, 30.0)
        await driver.put("value", os.path.join(directory, "file"))
        connection.send(messages.Beat(0), 0)
        await driver.fetch("file", os.path.join(directory, "fetched"))
        connection.send(messages.Bye())
        async for _ in connection.messages():
            pass

    asyncio.run(work())


class Times:
    """When the agent had sent the file, and when it had fetched it."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.done = asyncio.Event()

    def on_message(self, *_: Any) -> None:
        """Notes the end of the first transfer."""
        self.sent = time.perf_counter()

    def on_end(self, *_: Any) -> None:
        """Notes the end of the second one."""
        self.done.set()


async def transfer(directory: str, *, encrypt: bool) -> tuple[float, float]:
    """Megabytes a second to the driver, and from it."""
    secret, identity, times = new_secret(), make_identity() if encrypt else None, Times()
    served, tls = {"file": os.path.join(directory, "file")}, identity[1] if identity else None
    server = Server(secret, times.on_message, times.on_end, served, {}, directory, tls)
    port = await server.start(listen("127.0.0.1", None))
    arguments = (port, secret, identity and identity[0], directory)
    process = get_context("spawn").Process(target=agent, args=arguments)
    started = time.perf_counter()
    process.start()
    await times.done.wait()
    ended = time.perf_counter()
    await server.close()
    # The loop closes the connection meanwhile, for which the agent waits.
    await asyncio.to_thread(process.join)
    return MEGABYTES / (times.sent - started), MEGABYTES / (ended - times.sent)


def main() -> None:
    report = Report("encryption", f"The channel with and without TLS, {MEGABYTES} MB each way; a launch of two ranks")
    speeds: dict[tuple[bool, str], list[float]] = {}
    launches: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as directory:
        with open(os.path.join(directory, "file"), "wb") as file:
            file.write(os.urandom(MEGABYTES << 20))
        launcher = Launcher(2, store=os.path.join(directory, "store"))
        launcher.run(len, "abc")
        for _ in range(RUNS):
            for encrypt in (False, True):
                sent, fetched = asyncio.run(transfer(directory, encrypt=encrypt))
                speeds.setdefault((encrypt, "to the driver"), []).append(sent)
                speeds.setdefault((encrypt, "from the driver"), []).append(fetched)
                launches[encrypt] += timed(lambda e=encrypt: launcher.options(encrypt=e).run(len, "abc"))
    made = timed(make_identity, RUNS)
    for way in ("to the driver", "from the driver"):
        plain = report.add(f"{way}, plain", speeds[False, way], "MB/s")
        encrypted = report.add(f"{way}, encrypted", speeds[True, way], "MB/s")
        report.hold(f"{way}: encrypted / plain", encrypted / plain, 0.5, at_least=True)
    report.add("making a certificate", made)
    without = report.add("launch, plain", launches[False])
    launch = report.add("launch, encrypted", launches[True])
    report.hold("what encryption adds to a launch, s", launch - without, 0.1)
    report.finish()


if __name__ == "__main__":
    main()
