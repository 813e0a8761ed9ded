"""Frames: length, optional MAC, one type byte, body; and every size limit of the channel, which both ends read here.

A body is JSON for messages, raw bytes for file content.

Layout: ``uint32 length`` (big endian, of what follows) | ``16 bytes MAC`` (only on an
authenticated channel) | ``1 byte type`` (``J`` JSON object, ``B`` bytes; `session` adds its own) | rest.
The MAC is keyed BLAKE2b over direction, frame number and body, so a frame cannot be forged,
changed, reordered or replayed. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

MAX_FRAME = 64 << 20  # Largest frame in bytes that is accepted after the handshake
MAX_HANDSHAKE_FRAME = 4096  # Largest frame in bytes that is accepted before the peer has proved the secret
CHUNK = 1 << 20  # Bytes of file content per frame

BULK_WINDOW = 8 << 20
"""Log and file bytes of one agent that may be sent before the driver has accepted them."""

FETCH_WINDOW = 2 << 20
"""File bytes to one agent that may be sent before the agent has accepted them. Smaller, because the driver keeps as
many for each of its agents."""

ACK_EVERY = 1 << 20
"""Bytes received, or given credit for, after which the counts are sent without waiting for a ping."""

WRITE_AHEAD = 256 << 10
"""Sealed bytes that may wait for the socket; a sealed frame can no longer be overtaken."""

READ_SIZE = 256 << 10
"""Most bytes that are read from a socket in one call."""

FILE_THREADS = 32
"""Threads that read offered files and write uploads, so that a slow store blocks one of them and not the loop."""

_LENGTH = struct.Struct(">I")
_MAC_SIZE = 16
_COUNTER = struct.Struct(">Q")

Message = dict[str, Any]


class FrameError(ValueError):
    """A frame that is malformed, too large or carries a wrong MAC."""


class Sealer:
    """Computes the MACs of one direction of one connection, in frame order."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._count = 0

    def mac(self, body: bytes) -> bytes:
        """Returns the MAC of the next frame."""
        digest = hashlib.blake2b(key=self._key, digest_size=_MAC_SIZE, person=self._direction)
        digest.update(_COUNTER.pack(self._count))
        digest.update(body)
        self._count += 1
        return digest.digest()


def check_size(body: bytes) -> bytes:
    """Returns the body itself. Raises FrameError if a peer would refuse a frame of its size."""
    if len(body) + _MAC_SIZE > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return body


def pack(body: bytes, sealer: Sealer | None = None) -> bytes:
    """Returns the bytes of a frame from its body, whose first byte is its type."""
    mac = sealer.mac(check_size(body)) if sealer else b""
    return b"".join((_LENGTH.pack(len(mac) + len(check_size(body))), mac, body))


def dump(message: Message) -> bytes:
    """Returns a message as JSON, without its type byte."""
    return json.dumps(message, separators=(",", ":")).encode()


def parse(data: bytes) -> Message:
    """Returns the message in JSON bytes. Raises FrameError unless it is an object with a ``type``."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame is not JSON: {error}") from None
    return check_message(message)


def check_message(message: object) -> Message:
    """Returns the same object. Raises FrameError unless it is a dictionary with a ``type``."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FrameError("a frame is not a JSON object with a 'type'")
    return message


def encode(frame: Message | bytes, sealer: Sealer | None = None) -> bytes:
    """Returns the bytes of a frame: a dict becomes JSON, bytes stay unchanged."""
    return pack(b"B" + frame if isinstance(frame, bytes) else b"J" + dump(frame), sealer)


class Decoder:
    """Splits received bytes, in pieces of any size, into complete frames.

    Iteration yields messages and bytes; `next_body` returns bodies, for callers with more types.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._limit = MAX_HANDSHAKE_FRAME
        self._sealer: Sealer | None = None

    def trust(self, sealer: Sealer | None) -> None:
        """Accepts large frames from now on, which must carry this sealer's MAC."""
        self._limit = MAX_FRAME
        self._sealer = sealer

    def feed(self, data: bytes) -> None:
        """Adds received bytes to the buffer."""
        self._buffer += data

    def next_body(self) -> bytes | None:
        """Returns the next frame's type byte and body, or None until more bytes have arrived.

        Raises:
            FrameError: The length is out of bounds or the MAC is wrong.
        """
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if not 0 < length <= self._limit:
            raise FrameError(f"frame length {length} is outside 1..{self._limit}")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return None
        start = _LENGTH.size + (_MAC_SIZE if self._sealer else 0)
        with memoryview(buffer) as view:
            mac, body = bytes(view[_LENGTH.size : start]), bytes(view[start:end])
        del buffer[:end]
        if self._sealer and not hmac.compare_digest(mac, self._sealer.mac(body)):
            raise FrameError("a frame carries a wrong MAC")
        return body

    def __iter__(self) -> Decoder:
        return self

    def __next__(self) -> Message | bytes:
        body = self.next_body()
        if body is None:
            raise StopIteration
        if body[:1] == b"B":
            return body[1:]
        if body[:1] != b"J":
            raise FrameError(f"unknown frame type {body[:1]!r}")
        return parse(body[1:])
