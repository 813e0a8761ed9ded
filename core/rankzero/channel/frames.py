"""Frames: length, optional MAC, one type byte, body. JSON for messages, raw bytes for file content.

Layout: ``uint32 length`` (big endian, of what follows) | ``16 bytes MAC`` (only on an
authenticated channel) | ``1 byte type`` (``J`` JSON object, ``B`` bytes) | body.
The MAC is keyed BLAKE2b over direction, frame number and body, so a frame cannot be forged,
changed, reordered or replayed. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME = 64 << 20
"""Largest frame in bytes that is accepted after the handshake."""

MAX_HANDSHAKE_FRAME = 4096
"""Largest frame in bytes that is accepted before the peer has proved the secret."""

CHUNK = 1 << 20
"""Bytes of file content per frame."""

_LENGTH = struct.Struct(">I")
_MAC_SIZE = 16
_COUNTER = struct.Struct(">Q")

Message = dict[str, Any]


class FrameError(ValueError):
    """A frame that is malformed, too large or carries a wrong MAC."""


class Sealer:
    """Makes the MACs of one direction of one connection, in frame order."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._count = 0

    def mac(self, body: bytes) -> bytes:
        """The MAC of the next frame."""
        digest = hashlib.blake2b(key=self._key, digest_size=_MAC_SIZE, person=self._direction)
        digest.update(_COUNTER.pack(self._count))
        digest.update(body)
        self._count += 1
        return digest.digest()


def encode(frame: Message | bytes, sealer: Sealer | None = None) -> bytes:
    """One frame as bytes: a dict becomes JSON, bytes stay as they are."""
    body = b"B" + frame if isinstance(frame, bytes) else b"J" + json.dumps(frame, separators=(",", ":")).encode()
    if len(body) + _MAC_SIZE > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    mac = sealer.mac(body) if sealer else b""
    return _LENGTH.pack(len(mac) + len(body)) + mac + body


class Decoder:
    """Takes bytes as they arrive, in pieces of any size, and gives whole frames."""

    def __init__(self, limit: int = MAX_HANDSHAKE_FRAME, sealer: Sealer | None = None) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._sealer = sealer

    def trust(self, sealer: Sealer | None) -> None:
        """From here on frames may be large and must carry this sealer's MAC."""
        self._limit = MAX_FRAME
        self._sealer = sealer

    def feed(self, data: bytes) -> None:
        """Adds received bytes."""
        self._buffer += data

    def __iter__(self) -> Iterator[Message | bytes]:
        return self

    def __next__(self) -> Message | bytes:
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            raise StopIteration
        (length,) = _LENGTH.unpack_from(buffer)
        if not 0 < length <= self._limit:
            raise FrameError(f"frame length {length} is outside 1..{self._limit}")
        end = _LENGTH.size + length
        if len(buffer) < end:
            raise StopIteration
        frame = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        return self._open(frame)

    def _open(self, frame: bytes) -> Message | bytes:
        import hmac

        body = frame
        if self._sealer:
            mac, body = frame[:_MAC_SIZE], frame[_MAC_SIZE:]
            if not hmac.compare_digest(mac, self._sealer.mac(body)):
                raise FrameError("a frame carries a wrong MAC")
        if body[:1] == b"B":
            return body[1:]
        if body[:1] != b"J":
            raise FrameError(f"unknown frame type {body[:1]!r}")
        try:
            message = json.loads(body[1:])
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame is not JSON: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise FrameError("a frame is not a JSON object with a 'type'")
        return message
