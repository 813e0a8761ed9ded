"""The agent's end of the channel: finds the driver, and sends and fetches files.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rankzero import bounds
from rankzero.channel.connection import CHUNK, READ_SIZE, ChannelError, Connection, Limits, write_all
from rankzero.channel.messages import Ping
from rankzero.channel.tls import client_context
from rankzero.threads import in_thread, reply_of

CONNECT_PAUSE_MAX = 1.0  # Most seconds between two tries to find the driver; the first pause is a tenth of it


Address = tuple[int, Any]
"""Family and address of a socket."""


@dataclass
class Driver:
    """The driver of an attempt, as an agent knows it.

    Attributes:
        hosts: Its names and addresses, the likeliest first. The first one that proves the secret is kept.
        port: Its port.
        secret: The attempt's secret, hex.
        certificate: Its certificate as DER, if connections are encrypted.
        limits: Time limits.
        digests: Digests of the files that ranks execute, once it has proved the secret.
    """

    hosts: Sequence[str]
    port: int
    secret: str
    certificate: bytes | None = None
    limits: Limits = field(default_factory=Limits)
    digests: dict[str, str] = field(default_factory=dict)
    _address: Address | None = None

    async def find(self, task: int, seconds: float) -> Connection:
        """Returns the connection of the agent of a task.

        Args:
            task: Number of the task.
            seconds: Seconds until the search is given up.

        Raises:
            ChannelError: no driver was found, with the addresses that were tried, or it refuses this agent.
        """
        deadline, pause, problems = time.monotonic() + seconds, CONNECT_PAUSE_MAX / 10, dict[str, str]()
        while True:
            for host in self.hosts:
                try:
                    connection = await self._connect_to(host)
                except (OSError, ValueError) as error:
                    problems[host] = str(error) or type(error).__name__
                    continue
                await connection.request(f"AGENT {task}", self.limits.handshake)
                return connection
            if time.monotonic() >= deadline:
                tried = "; ".join(f"{host}: {what}" for host, what in problems.items())
                raise ChannelError(f"no driver was found on port {self.port} within {seconds:g} s: {tried}")
            # Not all agents at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(CONNECT_PAUSE_MAX, 2 * pause)

    async def _connect_to(self, host: str) -> Connection:
        """Connects to the first address of a host that proves the secret, and keeps it for later connections."""
        resolve = partial(socket.getaddrinfo, host, self.port, type=socket.SOCK_STREAM)
        try:
            infos = resolve(flags=socket.AI_NUMERICHOST)
        except OSError:
            # A name server may hang, so a thread calls it.
            infos = await reply_of(in_thread(resolve, "rankzero-resolve"), self.limits.connect)
        problem: Exception = OSError(f"{host} has no address")
        for family, _, _, _, address in infos:
            try:
                connection = await self._connect((family, address))
            except (OSError, ValueError) as error:
                problem = error
            else:
                self._address = family, address
                return connection
        raise problem

    async def _connect(self, address: Address) -> Connection:
        plain = socket.socket(address[0], socket.SOCK_STREAM)
        try:
            plain.setblocking(False)
            async with asyncio.timeout(self.limits.connect):
                await asyncio.get_running_loop().sock_connect(plain, address[1])
            async with asyncio.timeout(self.limits.handshake):
                tls: dict[str, Any] = {"ssl": client_context(), "server_hostname": ""} if self.certificate else {}
                reader, writer = await asyncio.open_connection(sock=plain, limit=READ_SIZE, **tls)
        except BaseException:
            plain.close()
            raise
        connection = Connection(reader, writer, self.limits)
        try:
            # Only the certificate itself is compared; its names and its dates are ignored.
            if self.certificate and writer.get_extra_info("ssl_object").getpeercert(True) != self.certificate:
                raise ChannelError("the process at this address has another certificate than the run's")
            async with asyncio.timeout(self.limits.handshake):
                self.digests = await connection.prove(self.secret)
        except BaseException as error:
            connection.abort(str(error))
            raise
        return connection

    async def keep(self, connection: Connection, driver_lives: Callable[[], Awaitable[bool]]) -> None:
        """Sends signs of life, and ends the connection to a driver that sends none. Never returns.

        Args:
            connection: The connection.
            driver_lives: Returns True while the kernel of this host reports that the driver's process lives: then a
                driver that sends nothing is paused, not lost.
        """
        while True:
            before = time.monotonic()
            connection.send(Ping())
            await asyncio.sleep(self.limits.ping)
            now = time.monotonic()
            if now - before > 2 * self.limits.ping or (connection.is_silent(now) and await driver_lives()):
                connection.received_at = now
            if connection.is_silent(now):
                connection.abort(f"nothing was received from the driver for {now - connection.received_at:.0f} s")

    # -- files ---------------------------------------------------------------------------------

    async def fetch(self, name: str, path: str) -> None:
        """Writes a file that the driver offers to a local path. Raises OSError with the reason if it cannot."""
        async with self._for_file() as connection:
            size = int(await connection.request(f"GET {name}", bounds.STORE_OUTAGE()))
            part = f"{path}.part"
            try:
                with open(part, "wb", buffering=0) as file:

                    async def write(data: bytes) -> None:
                        write_all(file, data)

                    await connection.receive_file(size, write)
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise

    async def put(self, name: str, path: str) -> None:
        """Sends a local file to the driver. Raises OSError with the reason if it cannot."""
        async with self._for_file() as connection:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                await connection.request(f"PUT {name} {size}", self.limits.silence)

                async def read() -> bytes:
                    return file.read(CHUNK) or b""

                await connection.send_file(size, read)
            answer = await connection.read_line(bounds.STORE_OUTAGE())
            if answer != "ok":
                raise ChannelError(answer or "the connection was closed before the file was stored")

    @contextlib.asynccontextmanager
    async def _for_file(self) -> AsyncIterator[Connection]:
        assert self._address is not None
        connection = await self._connect(self._address)
        try:
            yield connection
        finally:
            connection.close()
