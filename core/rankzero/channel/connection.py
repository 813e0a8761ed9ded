"""A connection between an agent and the driver: mutual proof of the run's secret, then messages or one file.

    driver -> client   32 random bytes
    client -> driver   32 random bytes, proof
    driver -> client   proof, a line of JSON: the digests of the files that ranks execute
    client -> driver   a line with a request, which the driver answers by a line that begins with ``ok``:
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
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import IO

from rankzero import bounds
from rankzero.channel.messages import Decoder, Message, Ping, encode
from rankzero.host.network import tune

PING_INTERVAL = 1.0  # Between two signs of life of each end
CONNECT_TIMEOUT = bounds.stretched(5.0)  # For a name to be resolved, and for a connection to be made
HANDSHAKE_TIMEOUT = bounds.stretched(10.0)  # For both ends of a new connection to prove the secret
CHUNK = 1 << 20  # Bytes of a file that are read or written together
READ_SIZE = 256 << 10  # Most bytes that are read from a connection together, and that it buffers before it is read
LINE_LIMIT = 4096  # Most bytes of a request, or of an answer
_SIZE = 32
_TCP_RTO_MAX_MS = 44  # tcp(7), Linux 6.15: the longest pause between two retransmissions
_RETRANSMIT_EVERY = 2000  # Milliseconds, so that a connection resumes soon after a cut of the network


class ChannelError(ConnectionError):
    """The other end has not proved the secret, refuses a request, or breaks the channel's rules."""


@dataclass(frozen=True)
class Limits:
    """The time limits of a channel, in seconds.

    Attributes:
        ping: Between two signs of life of each end.
        silence: Without a byte, after which the other end is lost.
        handshake: For both ends of a new connection to prove the secret.
        connect: For a name to be resolved, and for a connection to be made.
    """

    ping: float = PING_INTERVAL
    silence: float = field(default_factory=bounds.CONNECTION_LOST_AFTER)
    handshake: float = field(default_factory=HANDSHAKE_TIMEOUT)
    connect: float = field(default_factory=CONNECT_TIMEOUT)


def new_secret() -> str:
    """Returns a new secret for one attempt, as hex."""
    return secrets.token_hex(32)


class Connection:
    """A connection, for which `prove` and `admit` are the two ends of the proof."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        """Takes a connection that is made.

        Args:
            reader: Its incoming half.
            writer: Its outgoing half.
            limits: Time limits.
        """
        self._limits = limits
        self._reader = reader
        self._writer = writer
        self.received_at = time.monotonic()
        """Monotonic time at which bytes were last received."""
        self.reason: str | None = None
        """The reason for which this end has closed the connection."""
        connection: socket.socket = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            tune(connection)
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RETRANSMIT_EVERY)

    # -- the proof -----------------------------------------------------------------------------

    async def prove(self, secret: str) -> dict[str, str]:
        """Proves the secret to the driver, and returns its digests after it has done the same.

        Raises:
            ChannelError: the other end does not have the secret.
            OSError: the connection ended.
        """
        try:
            return await self._prove(secret)
        except asyncio.IncompleteReadError:
            raise ChannelError("the connection was closed before the driver had proved the run's secret") from None

    async def _prove(self, secret: str) -> dict[str, str]:
        theirs, mine = await self._reader.readexactly(_SIZE), secrets.token_bytes(_SIZE)
        self._writer.write(mine + _proof(secret, b"agent", theirs, mine))
        proof, digests = await self._reader.readexactly(_SIZE), await self.read_line(self._limits.handshake)
        if not hmac.compare_digest(proof, _proof(secret, b"driver", mine, theirs, digests.encode())):
            raise ChannelError("the process at this address did not prove the run's secret")
        found: dict[str, str] = json.loads(digests)
        return found

    async def admit(self, secret: str, digests: dict[str, str]) -> None:
        """Makes the client prove the secret, and then proves it to the client.

        Raises:
            ChannelError: the client does not have the secret.
            OSError, EOFError: the connection ended.
        """
        mine, line = secrets.token_bytes(_SIZE), json.dumps(digests).encode()
        self._writer.write(mine)
        theirs, proof = await self._reader.readexactly(_SIZE), await self._reader.readexactly(_SIZE)
        if not hmac.compare_digest(proof, _proof(secret, b"agent", mine, theirs)):
            raise ChannelError("a stranger: it did not prove the run's secret")
        self._writer.write(_proof(secret, b"driver", theirs, mine, line) + line + b"\n")

    # -- requests ------------------------------------------------------------------------------

    async def request(self, line: str, seconds: float) -> str:
        """Sends a line, and returns what follows ``ok`` in the answer. Raises ChannelError if the driver refuses it."""
        self.write(line.encode() + b"\n")
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
        if len(line) > LINE_LIMIT:
            raise ChannelError(f"a line of {len(line)} bytes")
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

    async def messages(
        self, room: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[tuple[Message, int | None]]:
        """Yields each message with the local rank of its sender, until the connection ends. Awaits ``room`` between.

        Raises:
            OSError, MessageError: the connection broke, or what arrived is no message.
        """
        decoder = Decoder()
        while data := await self._reader.read(READ_SIZE):
            self.received_at = time.monotonic()
            for message, local_rank in decoder.feed(data):
                if not isinstance(message, Ping):
                    yield message, local_rank
            if room:
                await room()
                self.received_at = time.monotonic()

    def is_silent(self, now: float) -> bool:
        """Returns True if nothing was received for `Limits.silence`."""
        return now - self.received_at >= self._limits.silence

    def close(self) -> None:
        """Closes the connection after all written bytes have been sent."""
        self._writer.close()

    def abort(self, reason: str) -> None:
        """Closes the connection immediately, for a reason that `reason` then has."""
        self.reason = self.reason or reason
        self._writer.transport.abort()

    # -- files ---------------------------------------------------------------------------------

    async def send_file(self, size: int, read: Callable[[], Awaitable[bytes]]) -> None:
        """Sends a file of this size, and its sha256.

        Args:
            size: Its size in bytes.
            read: Returns the next piece of the file, at its end an empty one.

        Raises:
            OSError: the file has another size, or the connection broke.
        """
        digest = hashlib.sha256()
        while data := await read():
            size -= len(data)
            digest.update(data)
            if size < 0:
                break
            self.write(data)
            async with asyncio.timeout(self._limits.silence):
                await self.drain()
        if size:
            raise OSError("the file changed while it was read")
        self.write(digest.hexdigest().encode() + b"\n")

    async def receive_file(self, size: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Receives a file of this size.

        Args:
            size: Its size in bytes.
            write: Receives each piece.

        Raises:
            OSError: the connection broke, or other bytes arrived than were sent.
        """
        digest = hashlib.sha256()
        while size:
            async with asyncio.timeout(self._limits.silence):
                data = await self._reader.read(min(size, CHUNK))
            if not data:
                raise ChannelError("the connection was closed before the end of the file")
            size -= len(data)
            digest.update(data)
            await write(data)
        if await self.read_line(self._limits.silence) != digest.hexdigest():
            raise ChannelError("the file was damaged on its way")


def _proof(secret: str, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), role + b"".join(parts), "sha256")


def write_all(file: IO[bytes], data: bytes) -> None:
    """Writes to an unbuffered file, which may take a part of the bytes only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
