"""Splits the output of a rank into lines and forwards them to the driver; a rank never blocks on it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import math
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from io import FileIO

from rankzero import bounds
from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.channel import messages
from rankzero.channel.connection import Connection
from rankzero.channel.messages import Message, decode, encode
from rankzero.worker.control import next_delivery

LOG_TAIL = 20  # Last lines of a rank kept for an error message
LAST_LINES_STALL_TIMEOUT = bounds.stretched(15.0)  # Without an accepted one of the last lines, until they are dropped
REDRAW_INTERVAL = 10.0  # Seconds in which one redraw of a progress bar becomes a line: below 1000 an hour for two ranks
HIGH_WATER = 1 << 20  # Bytes waiting for the driver above which lines are spooled to disk
BATCH = 256 << 10  # Bytes that are read from the disk together, unless a message is longer
BRISK = 0.005  # Seconds between two reads from a rank that prints much: its pipe holds what it prints meanwhile
RELEASE = 16 << 20  # Bytes that were read from the disk, after which their blocks are released
SPOOL_LIMIT = 8 << 30  # Bytes on disk above which lines are dropped and counted

QUIET_BYTES = 40 << 10
"""Most bytes of output in about two `DELIVERY_INTERVAL` of a quiet rank: the smallest usual pipe holds 64 KiB."""

MAX_LINE = 2 << 20  # Characters after which an unfinished line is passed on in pieces

_KEEP_SIZE_PUNCH_HOLE = 3  # fallocate(2)

_OWN_FRAME = re.compile(r'  File "(?:.*rankzero/(?:agent|host|task|worker)/\w+\.py|<string>)", line \d+ in ')


class Outbox:
    """The way of messages to the driver. Lines of ranks wait on this host's disk while the driver is behind.

    Every other message is sent immediately, so it may overtake lines.
    """

    def __init__(self, scratch: str, limit: int = SPOOL_LIMIT, release_size: int = RELEASE) -> None:
        """Prepares to send; until `attach`, messages wait.

        Args:
            scratch: Directory of the task.
            limit: Bytes on disk above which lines are dropped and counted.
            release_size: Bytes that were read from the disk, after which their blocks are released.
        """
        self._scratch = scratch
        self._limit = limit
        self._release_size = release_size
        self._connection: Connection | None = None
        self._early: list[bytes] = []
        self._spool: FileIO | None = None
        self._read = self._written = self._released = 0
        self._has_spooled = asyncio.Event()
        self._dropped: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._written - self._read + (self._connection.unsent if self._connection else 0)

    def attach(self, connection: Connection) -> None:
        """Sends the messages that wait, and later ones, over a connection to the driver."""
        self._connection = connection
        for line in self._early:
            connection.write(line)
        self._early.clear()
        self._has_spooled.set()

    def send(self, message: Message, local_rank: int | None = None) -> None:
        """Sends a message of the agent, or of one of its ranks."""
        line = encode(message, local_rank)
        if self._connection:
            self._connection.write(line)
        else:
            self._early.append(line)

    def send_lines(self, local_rank: int, lines: list[str]) -> None:
        """Sends lines of a rank behind its earlier ones, and the number of those that were dropped."""
        if dropped := self._dropped.pop(local_rank, 0):
            lines = [*lines, f"rankzero: {dropped} log lines were dropped, the driver was too slow"]
        if not lines:
            return
        data = encode(messages.Log(lines), local_rank)
        if self._connection and self._written == self._read and self._connection.unsent <= HIGH_WATER:
            self._connection.write(data)
        elif not self._store(data):
            self._dropped[local_rank] += len(lines) - bool(dropped) + dropped

    def _store(self, data: bytes) -> bool:
        try:
            if self._written - self._read + len(data) > self._limit:
                return False
            if self._spool is None:
                # Without a name: it goes with this process.
                self._spool = tempfile.TemporaryFile("w+b", buffering=0, dir=self._scratch)
            done = 0
            while done < len(data):
                done += os.pwrite(self._spool.fileno(), data[done:], self._written + done)
        except OSError:
            # The next lines replace what a full disk has taken of these.
            return False
        self._written += len(data)
        self._has_spooled.set()
        return True

    async def pump(self) -> None:
        """Sends the lines on the disk whenever the driver can take more. Never returns."""
        while True:
            await self._has_spooled.wait()
            while self._written > self._read and self._connection:
                with contextlib.suppress(OSError):
                    await self._connection.drain()
                self._connection.write(self._next_block())
            self._has_spooled.clear()

    def _next_block(self) -> bytes:
        """Returns the next messages of the file. Those that cannot be read are dropped and counted as one line."""
        assert self._spool is not None
        size, end, block = BATCH, 0, b""
        with contextlib.suppress(OSError):
            while not end and len(block) < self._written - self._read:
                wanted = min(size, self._written - self._read)
                block = os.pread(self._spool.fileno(), wanted, self._read)
                end, size = block.rfind(b"\n") + 1, 2 * size
                if len(block) < wanted:
                    break
        if not end:
            self._dropped[0] += 1
        self._read = self._read + end if end else self._written
        with contextlib.suppress(OSError):
            if self._read == self._written:
                self._spool.truncate(0)
                self._read = self._written = self._released = 0
            elif self._read - self._released >= self._release_size:
                release(self._spool.fileno(), self._released, self._read - self._released)
                self._released = self._read
        return block[:end]

    async def deliver(self, deadline: Callable[[], float]) -> None:
        """Waits until the driver has everything, as long as it takes something, and closes the connection.

        Args:
            deadline: Returns the monotonic time at which the wait ends in any case; it may change meanwhile.
        """
        left, progress_at = self.waiting, time.monotonic()
        while self.waiting and self._connection and not self._connection.reason:
            await asyncio.sleep(bounds.POLL_INTERVAL_BRIEF)
            now = time.monotonic()
            if self.waiting != left:
                left, progress_at = self.waiting, now
            if now > min(deadline(), progress_at + LAST_LINES_STALL_TIMEOUT()):
                break
        while self._written > self._read:
            for line in self._next_block().splitlines():
                message, local_rank = decode(line)
                self._dropped[local_rank or 0] += len(message.facts()["lines"])
        for local_rank in list(self._dropped):
            self.send_lines(local_rank, [])
        self.send(messages.Bye())


class RankOutput:
    """Splits a rank's output into lines, keeps the last ones, and forwards all to the driver."""

    def __init__(self, local_rank: int, outbox: Outbox) -> None:
        self._local_rank = local_rank
        self._outbox = outbox
        self._splitter = LineSplitter()
        self._tail: deque[str] = deque(maxlen=LOG_TAIL)
        self._recent = 0.0
        self._fed_at = 0.0

    @property
    def tail(self) -> list[str]:
        """The last lines of the rank, oldest first."""
        return list(self._tail)

    @property
    def pause(self) -> float:
        """Seconds until the output should be read again: more if there is little, since each message has a cost."""
        return next_delivery() - time.monotonic() if self._recent < QUIET_BYTES else BRISK

    def feed(self, data: bytes) -> None:
        """Adds bytes that the rank wrote."""
        now = time.monotonic()
        self._recent = self._recent * 0.5 ** ((now - self._fed_at) / bounds.DELIVERY_INTERVAL) + len(data)
        self._fed_at = now
        self.add(self._splitter.feed(data))

    def add(self, lines: list[str]) -> None:
        """Adds complete lines to the tail and forwards them."""
        # The stack of a crash must not displace the last lines of the rank.
        self._tail.extend(line[:LOG_TAIL_WIDTH] for line in lines[-2 * LOG_TAIL :] if not is_own_frame(line))
        self._outbox.send_lines(self._local_rank, lines)

    def finish(self) -> None:
        """Sends the last, unfinished line once the rank's output has ended."""
        self.add(self._splitter.finish())


def release(descriptor: int, start: int, size: int) -> None:
    """Gives the blocks of a part of a file back to the file system, where that can do it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(size))


def is_own_frame(line: str) -> bool:
    """Returns True for a line of faulthandler's output that shows a frame of rankzero, below the user's code."""
    return bool(_OWN_FRAME.match(line))


class LineSplitter:
    r"""Decodes UTF-8 incrementally and cuts at ``\n`` and ``\r\n``. A line that arrives in pieces is returned whole.

    A progress bar redraws its line with ``\r``. Of the texts that a redraw replaces, one in `REDRAW_INTERVAL`
    seconds becomes a line, and so does the last one. Bytes that are not UTF-8 become U+FFFD.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clock = clock
        self._pieces: list[str] = []
        self._length = 0
        self._drawn = ""
        self._was_drawn = False
        self._draw_at = -math.inf

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that ``data`` completes."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """Returns the lines that remain at the end of the output."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        return lines + self._end() if self._pieces or self._drawn else lines

    def _cut(self, text: str) -> list[str]:
        lines: list[str] = []
        for number, part in enumerate(text.split("\n")):
            if number:
                lines += self._end()
            *drawn, last = part.split("\r") if "\r" in part else (part,)
            for piece in drawn:
                self._add(piece)
                lines += self._draw()
            self._add(last)
        if self._length > MAX_LINE:
            lines.append(self._take())
        return lines

    def _add(self, part: str) -> None:
        if part:
            self._pieces.append(part)
            self._length += len(part)

    def _draw(self) -> list[str]:
        """Ends a text that the next one replaces, unless the line ends here."""
        self._drawn = self._take() or self._drawn
        if not self._drawn or (now := self._clock()) < self._draw_at:
            return []
        self._draw_at = now + REDRAW_INTERVAL
        text, self._drawn, self._was_drawn = self._drawn, "", True
        return [text]

    def _end(self) -> list[str]:
        """Ends the line: with its text, or with the last one that was drawn and is no line yet."""
        text = self._take() or self._drawn
        lines = [text] if text or not self._was_drawn else []
        self._drawn, self._was_drawn = "", False
        return lines

    def _take(self) -> str:
        line = "".join(self._pieces)
        self._pieces.clear()
        self._length = 0
        return line
