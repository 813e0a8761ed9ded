"""A connection between an agent and the driver: mutual proof of the run's secret, then messages or one file.

    driver -> client   32 random bytes
    client -> driver   32 random bytes, proof, a line with a request
    driver -> client   proof, a line of JSON: the digests of the files that ranks execute; then it answers the request
                       by a line that begins with ``ok``:
                       ``AGENT task``, then messages in both directions (`rankzero.channel.messages`)
                       ``GET name``: the answer has the size, and the file and its sha256 follow
                       ``PUT name size``: the file and its sha256 follow, and another ``ok`` when it is stored

A proof is HMAC-SHA256 (RFC 2104) over the prover's role, both random numbers and, for the driver, the digests. A
stranger can send 64 bytes. An encrypted connection is protected from there on; on a plain one, someone who can change
packets of others could change messages after the proof, but not what ranks execute. Standard library only: this module
travels to executors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from rankzero import bounds
from rankzero.channel.messages import Decoder, Message, encode
from rankzero.channel.tls import client_context
from rankzero.host.network import tune
from rankzero.threads import ActionThread, in_thread, reply_of

PING_INTERVAL = 1.0  # Between two signs of life of each end
CONNECT_TIMEOUT = bounds.stretched(5.0)  # For a name to be resolved, and for a connection to an address to be made
CONNECT_PAUSE_MAX = 1.0  # Most seconds between two tries to find the driver; the first pause is a tenth of it
HANDSHAKE_TIMEOUT = bounds.stretched(10.0)  # For both ends of a new connection to prove the secret
CHUNK = 1 << 20  # Bytes of a file that are read or written together
READ_SIZE = 256 << 10  # Most bytes that are read from a connection together, and that it buffers before it is read
_SIZE = 32


class ChannelError(ConnectionError):
    """The other end has not proved the secret, refuses a request, or breaks the channel's rules."""


def new_secret() -> str:
    """Returns a new secret for one attempt, as hex."""
    return secrets.token_hex(32)


class Connection:
    """A connection, for which `prove` and `admit` are the two ends of the proof.

    Attributes:
        received_at: Monotonic time at which bytes were last received.
        reason: The reason for which this end has closed the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received_at = time.monotonic()
        self.reason: str | None = None
        with contextlib.suppress(OSError):
            tune(writer.get_extra_info("socket"))

    # -- the proof, and requests ---------------------------------------------------------------

    async def prove(self, secret: str, request: str) -> dict[str, str]:
        """Proves the secret to the driver, and returns its digests after it has done the same. Raises OSError.

        The driver then replies to the request: `answer`.
        """
        mine = secrets.token_bytes(_SIZE)
        try:
            theirs = await self._reader.readexactly(_SIZE)
            self._writer.write(mine + _proof(secret, b"agent", theirs, mine) + request.encode() + b"\n")
            proof = await self._reader.readexactly(_SIZE)
        except asyncio.IncompleteReadError:
            raise ChannelError("the connection was closed before the driver had proved the run's secret") from None
        digests = await self.read_line(HANDSHAKE_TIMEOUT())
        if not hmac.compare_digest(proof, _proof(secret, b"driver", mine, theirs, digests.encode())):
            raise ChannelError("the process at this address did not prove the run's secret")
        found: dict[str, str] = json.loads(digests)
        return found

    async def admit(self, secret: str, digests: dict[str, str]) -> None:
        """Makes the client prove the secret, and then proves it to the client. Raises OSError, EOFError."""
        mine, line = secrets.token_bytes(_SIZE), json.dumps(digests).encode()
        self._writer.write(mine)
        theirs, proof = await self._reader.readexactly(_SIZE), await self._reader.readexactly(_SIZE)
        if not hmac.compare_digest(proof, _proof(secret, b"agent", mine, theirs)):
            raise ChannelError("a stranger: it did not prove the run's secret")
        self._writer.write(_proof(secret, b"driver", theirs, mine, line) + line + b"\n")

    async def answer(self, seconds: float) -> str:
        """Returns what follows ``ok`` in the driver's next line. Raises ChannelError if it begins with another word."""
        answer = await self.read_line(seconds)
        if not answer.startswith("ok"):
            raise ChannelError(answer or "the connection was closed")
        return answer[2:].strip()

    async def read_line(self, seconds: float) -> str:
        """Returns the next line, at the end of the connection an empty one. Raises ChannelError, TimeoutError."""
        async with asyncio.timeout(seconds):
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return ""
            except asyncio.LimitOverrunError:
                raise ChannelError("a line without an end") from None
        return line.decode("utf-8", "replace").rstrip("\n")

    # -- messages ------------------------------------------------------------------------------

    def send(self, message: Message, local_rank: int | None = None) -> None:
        """Sends a message, in its order. Does not wait."""
        self.write(encode(message, local_rank))

    def write(self, data: bytes) -> None:
        """Sends bytes, in their order. Does not wait."""
        if not self._writer.is_closing():
            self._writer.write(data)

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return 0 if self._writer.is_closing() else self._writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Waits until few bytes are unsent. Raises OSError if the connection has ended."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[tuple[Message, int | None]]:
        """Yields each message with the local rank of its sender, until the connection ends.

        Raises:
            OSError, MessageError: the connection broke, or what arrived is no message.
        """
        decoder = Decoder()
        while data := await self._reader.read(READ_SIZE):
            self.received_at = time.monotonic()
            for message in decoder.feed(data):
                yield message

    async def keep(self, other: str, lives: Callable[[], bool] | None = None) -> None:
        """Sends signs of life, and ends the connection when the other end sends none. Never returns.

        This process may have stood still, under a debugger or on a starved host, and could not read what had arrived.
        Then the other end has its whole time again.

        Args:
            other: The name of the other end, for `reason`.
            lives: Returns True while the kernel of this host reports that the other process lives: then one that
                sends nothing is paused, not lost.
        """
        while True:
            before = time.monotonic()
            await asyncio.sleep(PING_INTERVAL)
            self.write(b"\n")
            now = time.monotonic()
            is_silent = now - self.received_at >= bounds.CONNECTION_LOST_AFTER()
            if now - before > 2 * PING_INTERVAL or (is_silent and lives and lives()):
                self.received_at = now
            elif is_silent:
                self.abort(f"nothing was received from {other} for {now - self.received_at:.0f} s")

    def close(self) -> None:
        """Closes the connection after all written bytes have been sent."""
        self._writer.close()

    def abort(self, reason: str) -> None:
        """Closes the connection immediately, for a reason that `reason` then has."""
        self.reason = self.reason or reason
        self._writer.transport.abort()

    # -- files, which a thread reads and writes: a disk may hang ---------------------------------

    async def send_file(self, file: IO[bytes], size: int) -> None:
        """Sends an open file of this size, and its sha256; closes the file. Raises OSError if it has another size."""
        digest, thread = hashlib.sha256(), ActionThread("rankzero-files")
        try:
            while size and (data := await reply_of(thread.submit(partial(file.read, min(size, CHUNK))), at_once=0)):
                size -= len(data)
                digest.update(data)
                self.write(data)
                async with asyncio.timeout(bounds.CONNECTION_LOST_AFTER()):
                    await self.drain()
        finally:
            thread.submit(file.close)
            thread.end()
        if size:
            raise OSError("the file changed while it was read")
        self.write(digest.hexdigest().encode() + b"\n")

    async def receive_file(self, path: str, size: int) -> None:
        """Receives a file of this size. Raises OSError, and leaves no file, if it cannot be written or is damaged."""
        digest, thread, timeout = hashlib.sha256(), ActionThread("rankzero-files"), bounds.CONNECTION_LOST_AFTER()
        try:
            file: IO[bytes] = await reply_of(thread.submit(lambda: open(path, "wb")), at_once=0)
            try:
                while size:
                    async with asyncio.timeout(timeout):
                        data = await self._reader.read(min(size, CHUNK))
                    if not data:
                        raise ChannelError("the connection was closed before the end of the file")
                    size -= len(data)
                    digest.update(data)
                    await reply_of(thread.submit(partial(file.write, data)), at_once=0)
            finally:
                # A file server may report a full disk only now.
                await reply_of(thread.submit(file.close), at_once=0)
            if await self.read_line(timeout) != digest.hexdigest():
                raise ChannelError("the file was damaged on its way")
        except BaseException:
            thread.submit(partial(os.unlink, path))
            raise
        finally:
            thread.end()


def _proof(secret: str, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), role + b"".join(parts), "sha256")


# -- the agent's end -------------------------------------------------------------------------------


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
                    connection = await self._reach(host, f"AGENT {task}")
                except (OSError, ValueError) as error:
                    problems[host] = str(error) or type(error).__name__
                    continue
                await connection.answer(HANDSHAKE_TIMEOUT())
                return connection
            if time.monotonic() >= deadline:
                tried = "; ".join(f"{host}: {what}" for host, what in problems.items())
                raise ChannelError(f"no driver was found on port {self.port} within {seconds:g} s: {tried}")
            # Not all agents at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(CONNECT_PAUSE_MAX, 2 * pause)

    async def _reach(self, host: str, request: str) -> Connection:
        """Returns a connection to the first address of a host that proves the secret, which has the request."""
        resolve = partial(socket.getaddrinfo, host, self.port, type=socket.SOCK_STREAM)
        try:
            found = resolve(flags=socket.AI_NUMERICHOST)
        except OSError:
            # A name. Not by asyncio, whose threads are joined at exit: a name server may never reply.
            found = await reply_of(in_thread(resolve, "rankzero-names"), CONNECT_TIMEOUT())
        problems = []
        for address in (str(place[0]) for *_, place in found):
            try:
                return await self._connect(address, request)
            except (OSError, ValueError) as error:
                problems.append(str(error) or type(error).__name__)
        raise OSError(", ".join(problems))

    async def _connect(self, address: str, request: str) -> Connection:
        """Returns a connection to an address that has proved the secret, which `fetch` and `put` use from then on."""
        tls: dict[str, Any] = {"ssl": client_context(), "server_hostname": ""} if self.certificate else {}
        async with asyncio.timeout(CONNECT_TIMEOUT()):
            reader, writer = await asyncio.open_connection(address, self.port, limit=READ_SIZE, **tls)
        connection = Connection(reader, writer)
        try:
            # Only the certificate itself is compared; its names and its dates are ignored.
            if self.certificate and writer.get_extra_info("ssl_object").getpeercert(True) != self.certificate:
                raise ChannelError("the process at this address has another certificate than the run's")
            async with asyncio.timeout(HANDSHAKE_TIMEOUT()):
                self.digests = await connection.prove(self.secret, request)
            self._address = address
        except BaseException as error:
            connection.abort(str(error))
            raise
        return connection

    async def fetch(self, name: str, path: str) -> None:
        """Writes a file that the driver offers to a local path. Raises OSError with the reason if it cannot."""
        with contextlib.closing(await self._connect(self._address, f"GET {name}")) as connection:
            size = await connection.answer(bounds.STORE_OUTAGE())
            await connection.receive_file(path, int(size))

    async def put(self, name: str, path: str) -> None:
        """Sends a local file to the driver. Raises OSError with the reason if it cannot."""
        size = os.path.getsize(path)
        with contextlib.closing(await self._connect(self._address, f"PUT {name} {size}")) as connection:
            await connection.answer(bounds.CONNECTION_LOST_AFTER())
            await connection.send_file(open(path, "rb"), size)
            await connection.answer(bounds.STORE_OUTAGE())
