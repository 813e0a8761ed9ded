"""`Driver`: the agent's end of the channel finds the driver, and sends and fetches files.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankzero import bounds
from rankzero.channel import connection as connections
from rankzero.channel.connection import READ_SIZE, ChannelError, Connection
from rankzero.channel.tls import client_context
from rankzero.threads import in_thread, reply_of

CONNECT_PAUSE_MAX = 1.0  # Most seconds between two tries to find the driver; the first pause is a tenth of it


@dataclass
class Driver:
    """The driver of an attempt, as an agent knows it.

    Attributes:
        hosts: Its names and addresses, the likeliest first. The first one that proves the secret is kept.
        port: Its port.
        secret: The attempt's secret, hex.
        certificate: Its certificate as DER, if connections are encrypted.
        digests: Digests of the files that ranks execute, once it has proved the secret.
    """

    hosts: Sequence[str]
    port: int
    secret: str
    certificate: bytes | None = None
    digests: dict[str, str] = field(default_factory=dict)
    _address: str = ""

    async def find(self, task: int, seconds: float) -> Connection:
        """Returns the connection of the agent of a task; each address is tried at least once.

        Raises ChannelError if no driver is found within ``seconds``, or it refuses this agent.
        """
        deadline, pause, problems = time.monotonic() + seconds, CONNECT_PAUSE_MAX / 10, dict[str, str]()
        while True:
            for host in self.hosts:
                try:
                    connection = await self._reach(host)
                except (OSError, ValueError) as error:
                    problems[host] = str(error) or type(error).__name__
                    continue
                await connection.request(f"AGENT {task}", connections.HANDSHAKE_TIMEOUT())
                return connection
            if time.monotonic() >= deadline:
                tried = "; ".join(f"{host}: {what}" for host, what in problems.items())
                raise ChannelError(f"no driver was found on port {self.port} within {seconds:g} s: {tried}")
            # Not all agents at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(CONNECT_PAUSE_MAX, 2 * pause)

    async def _reach(self, host: str) -> Connection:
        """Returns a connection to the first address of a host that proves the secret."""
        # Not by asyncio, whose threads are joined at exit: a name server may never reply.
        resolve = functools.partial(socket.getaddrinfo, host, self.port, type=socket.SOCK_STREAM)
        found = await reply_of(in_thread(resolve, "rankzero-names"), connections.CONNECT_TIMEOUT())
        problems = []
        for address in (str(place[0]) for *_, place in found):
            try:
                return await self._connect(address)
            except (OSError, ValueError) as error:
                problems.append(str(error) or type(error).__name__)
        raise OSError(", ".join(problems))

    async def _connect(self, address: str) -> Connection:
        """Returns a connection to an address that has proved the secret, and is kept for later connections."""
        tls: dict[str, Any] = {"ssl": client_context(), "server_hostname": ""} if self.certificate else {}
        async with asyncio.timeout(connections.CONNECT_TIMEOUT()):
            reader, writer = await asyncio.open_connection(address, self.port, limit=READ_SIZE, **tls)
        connection = Connection(reader, writer)
        try:
            # Only the certificate itself is compared; its names and its dates are ignored.
            if self.certificate and writer.get_extra_info("ssl_object").getpeercert(True) != self.certificate:
                raise ChannelError("the process at this address has another certificate than the run's")
            async with asyncio.timeout(connections.HANDSHAKE_TIMEOUT()):
                self.digests = await connection.prove(self.secret)
            self._address = address
        except BaseException as error:
            connection.abort(str(error))
            raise
        return connection

    async def fetch(self, name: str, path: str) -> None:
        """Writes a file that the driver offers to a local path. Raises OSError with the reason if it cannot."""
        with contextlib.closing(await self._connect(self._address)) as connection:
            size = await connection.request(f"GET {name}", bounds.STORE_OUTAGE())
            await connection.receive_file(path, int(size))

    async def put(self, name: str, path: str) -> None:
        """Sends a local file to the driver. Raises OSError with the reason if it cannot."""
        with contextlib.closing(await self._connect(self._address)) as connection:
            size = os.path.getsize(path)
            await connection.request(f"PUT {name} {size}", bounds.CONNECTION_LOST_AFTER())
            await connection.send_file(open(path, "rb"), size)
            await connection.answer(bounds.STORE_OUTAGE())
