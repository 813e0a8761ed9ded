"""What encryption costs: a file through the channel, both ways, and a launch; with and without, taking turns.

Agent and driver are two processes of this machine, which share its cores: between two hosts each has its own.

Run: ``python benchmarks/encryption.py [megabytes]``.
"""

import os
import queue
import select
import sys
import tempfile
import time
from multiprocessing import get_context
from typing import Any

from measure import Report, timed

from rankzero import Launcher
from rankzero.channel import auth
from rankzero.channel.client import ChannelClient
from rankzero.channel.server import ChannelServer
from rankzero.channel.tls import make_identity
from rankzero.host.network import listen

MEGABYTES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 256
RUNS = 5


def agent(port: int, secret: str, certificate: bytes | None, directory: str) -> None:
    """Sends the file, then fetches it."""
    client = ChannelClient(["127.0.0.1"], port, secret, 0, None, certificate)
    client.start()
    client.send_file("value", os.path.join(directory, "file"), {"type": "sent"})
    client.fetch("file", os.path.join(directory, "fetched"))
    while not any(message["type"] == "fetched" for message in receive(client)):
        pass
    client.queue({"type": "done"})
    client.close(30.0)


def receive(client: ChannelClient) -> list[dict[str, Any]]:
    select.select([client.fileno()], [], [], 1.0)
    return client.receive()


def transfer(directory: str, *, encrypt: bool) -> tuple[float, float]:
    """Megabytes a second to the driver, and from it."""
    secret, identity = auth.new_secret(), make_identity() if encrypt else None
    inbox: queue.Queue[tuple[float, dict[str, Any]]] = queue.Queue()
    server = ChannelServer(
        secret,
        lambda _, message: inbox.put((time.perf_counter(), message)),
        served={"file": os.path.join(directory, "file")},
        upload_directory=directory,
        identity=identity,
    )
    arguments = (server.start(listen("127.0.0.1", None)), secret, identity and identity.certificate, directory)
    process = get_context("fork").Process(target=agent, args=arguments)
    started = time.perf_counter()
    process.start()
    times = {}
    while "done" not in times:
        when, message = inbox.get(timeout=300)
        times[message["type"]] = when
    process.join()
    server.close()
    return MEGABYTES / (times["sent"] - started), MEGABYTES / (times["done"] - times["sent"])


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
                sent, fetched = transfer(directory, encrypt=encrypt)
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
