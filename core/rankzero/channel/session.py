"""`Session`: one end of a session, which numbers, orders, keeps and acknowledges frames. No I/O.

A session outlives its connections. Frames get their number when they are first sent and are kept,
unsealed, until the other end acknowledges them. After a broken connection both ends report how many
frames they have, and the rest is sent again, in order. So no frame is lost, doubled or reordered within its lane.

Control messages precede bulk messages (logs, file content) that are not sent yet. Bulk frames
wait in streams that take turns of `frames.CHUNK` bytes, and no more of them are in flight than the
other end gives credit for. Standard library only: this module travels to executors.

Frame types: ``J`` a message, ``L`` a bulk message, ``C`` a message of the channel itself, ``B`` file content
(these four are numbered), ``A`` counts of frames received and of bulk bytes accepted, which also is the ping.
"""

from __future__ import annotations

import struct
from collections import deque

from rankzero.channel import frames
from rankzero.channel.frames import FrameError, Message

CONTROL, BULK, OWN, CONTENT, ACK = b"J", b"L", b"C", b"B", b"A"

LOGS = 0
"""The stream of bulk messages."""

UPLOADS = 1
"""The stream of an agent's uploads, which are sent one after the other; each fetched file has its own stream."""

MADE_UP = frozenset({"disconnected", "reconnected", "lost", "uploaded", "fetched"})
"""Types of messages that only the channel synthesizes; a message of such a type cannot be sent."""

_ACK = struct.Struct(">QQ")
_STREAM = struct.Struct(">I")


def message_body(kind: bytes, message: Message) -> bytes:
    """Returns a message as the body of a frame. Raises FrameError if it cannot be sent."""
    if frames.check_message(message)["type"] in MADE_UP and kind != OWN:
        raise FrameError(f"a message of the type {message['type']!r} is synthesized by the channel, not sent")
    return frames.check_size(kind + frames.dump(message))


def content_body(stream: int, data: bytes) -> bytes:
    """Returns a piece of a file as the body of a frame."""
    return b"".join((CONTENT, _STREAM.pack(stream), data))


def split_content(body: bytes) -> tuple[int, memoryview]:
    """Returns the stream's number and the piece of the file. Raises FrameError."""
    if len(body) <= 1 + _STREAM.size:
        raise FrameError("a piece of a file is too short")
    return _STREAM.unpack_from(body, 1)[0], memoryview(body)[1 + _STREAM.size :]


class Session:
    """Counts, keeps and orders the frames of one end. Not thread-safe."""

    def __init__(self, send_window: int, take_window: int) -> None:
        """Starts a session in which no frame was sent or received.

        Args:
            send_window: Bytes of bulk frames that may be sent before the other end accepts them.
            take_window: The same limit for received bulk frames; the other end breaks the rules if it sends more.
        """
        self._send_window = send_window
        self._take_window = take_window
        self._control: deque[bytes] = deque()
        self._streams: dict[int, deque[bytes]] = {}
        self._turn = 0
        self._sent: deque[bytes] = deque()
        self._acknowledged = 0
        self._again: deque[bytes] = deque()
        self._bulk_sent = 0
        self._credit = 0
        self._bulk_taken = 0
        self._granted = 0
        self._unreported = 0
        self._ping = False
        self.received = 0
        self.bulk_bytes = 0

    # -- sending -------------------------------------------------------------------------------

    def queue(self, body: bytes) -> None:
        """Puts a frame in the control lane."""
        self._control.append(body)

    def queue_bulk(self, stream: int, body: bytes) -> None:
        """Puts a frame in a stream of the bulk lane."""
        if body[:1] == BULK:
            self.bulk_bytes += len(body)
        self._streams.setdefault(stream, deque()).append(body)

    def wants(self, stream: int) -> bool:
        """Returns True if the window has room and no frame of this stream is waiting."""
        return stream not in self._streams and self._has_room()

    def waits(self, stream: int) -> bool:
        """Returns True if a frame of this stream has not been sent yet."""
        return stream in self._streams

    @property
    def is_idle(self) -> bool:
        """True if no frame waits to be sent or sent again."""
        return not (self._control or self._streams or self._again)

    def ping(self) -> None:
        """Sends the counts with the next frame."""
        self._ping = True

    def next(self) -> bytes | None:
        """Returns the body of the frame to send now; None if there is none or no room for it."""
        if self._ping or self._unreported >= frames.ACK_EVERY:
            self._ping, self._unreported = False, 0
            return ACK + _ACK.pack(self.received, self._granted)
        if self._again:
            return self._again.popleft()
        body = self._control.popleft() if self._control else self._next_bulk()
        if body is not None:
            self._sent.append(body)
        return body

    @property
    def unaccepted(self) -> int:
        """Bytes of bulk frames that were sent and for which the other end has not given credit yet."""
        return self._bulk_sent - self._credit

    def _has_room(self) -> bool:
        return self.unaccepted < self._send_window

    def _next_bulk(self) -> bytes | None:
        if not self._streams or not self._has_room():
            return None
        number, stream = next(iter(self._streams.items()))
        body = stream.popleft()
        self._turn += len(body)
        if not stream or self._turn >= frames.CHUNK:
            self._turn = 0
            del self._streams[number]
            if stream:
                self._streams[number] = stream
        if body[:1] in (BULK, CONTENT):
            self._bulk_sent += len(body)
        return body

    def can_resume(self, received: int) -> bool:
        """Returns True if the other end may have received this many frames, and this end has the rest."""
        return self._acknowledged <= received <= self._acknowledged + len(self._sent)

    def resume(self, received: int) -> None:
        """Continues the session on a new connection, whose other end has received this many frames.

        Raises:
            FrameError: This count is impossible.
        """
        self._again.clear()
        self._acknowledge(received)
        self._again = deque(self._sent)
        self._ping = True

    def _acknowledge(self, received: int) -> None:
        if not self.can_resume(received) or received > self._acknowledged + len(self._sent) - len(self._again):
            raise FrameError(f"{received} frames cannot have arrived")
        while self._acknowledged < received:
            body = self._sent.popleft()
            self._acknowledged += 1
            if body[:1] == BULK:
                self.bulk_bytes -= len(body)

    # -- receiving -----------------------------------------------------------------------------

    def take(self, body: bytes) -> bytes:
        """Counts a received frame; applies the counts of the other end.

        Returns:
            The frame's type. Bulk frames need a `grant` of their size when they have been accepted.

        Raises:
            FrameError: The other end broke the rules.
        """
        kind = body[:1]
        if kind == ACK:
            self._take_ack(body)
            return kind
        if kind not in (CONTROL, BULK, OWN, CONTENT):
            raise FrameError(f"unknown frame type {kind!r}")
        if kind in (BULK, CONTENT):
            if self._bulk_taken - self._granted >= self._take_window:
                raise FrameError("more bulk than there was credit for")
            self._bulk_taken += len(body)
        self.received += 1
        self._unreported += len(body)
        return kind

    def _take_ack(self, body: bytes) -> None:
        if len(body) != 1 + _ACK.size:
            raise FrameError("an acknowledgement is malformed")
        received, credit = _ACK.unpack_from(body, 1)
        if not self._credit <= credit <= self._bulk_sent:
            raise FrameError(f"credit for {credit} bytes of {self._bulk_sent} that were sent")
        self._acknowledge(received)
        self._credit = credit

    def grant(self, size: int) -> None:
        """Gives the other end credit for bulk bytes that have been accepted."""
        self._granted += size
        self._unreported += size
