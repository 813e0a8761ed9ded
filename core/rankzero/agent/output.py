"""`Output` splits the output of a rank into lines and forwards them to the driver; a rank never blocks on it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from io import FileIO

from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.channel import messages
from rankzero.channel.connection import Connection
from rankzero.worker.failures import is_own_frame

LOG_TAIL = 20  # Last lines of a rank kept for an error message
REDRAW_INTERVAL = 10.0  # Seconds in which one redraw of a progress bar becomes a line: below 1000 an hour for two ranks
HIGH_WATER = 1 << 20  # Bytes waiting for the driver above which output is spooled to disk
BATCH = 256 << 10  # Bytes that are read from the disk together
SPOOL_LIMIT = 8 << 30  # Bytes of a rank on disk above which its output is dropped, and its lines are counted
MAX_LINE = 2 << 20  # Characters after which an unfinished line is passed on in pieces

_KEEP_SIZE_PUNCH_HOLE = 3  # fallocate(2)


class Output:
    """The output of a rank, which waits in a file on this host's disk while the driver is behind."""

    def __init__(self, local_rank: int, scratch: str, connection: Connection) -> None:
        """Prepares for output, which `feed` forwards to the driver; ``scratch`` is the task's directory."""
        self._local_rank, self._scratch, self._connection = local_rank, scratch, connection
        self._splitter = LineSplitter()
        self._tail: deque[str] = deque(maxlen=LOG_TAIL)
        self._spool: FileIO | None = None
        self._read = self._written = self._dropped = 0
        self._sending: asyncio.Task[None] | None = None

    @property
    def tail(self) -> list[str]:
        """The last lines of the rank, oldest first; also those that wait on the disk."""
        newest = b""
        if self.waiting and self._spool:
            newest = os.pread(self._spool.fileno(), BATCH, max(self._read, self._written - BATCH))
        lines = [line[:LOG_TAIL_WIDTH] for line in newest.decode(errors="replace").splitlines()]
        return [*self._tail, *lines][-LOG_TAIL:]

    @property
    def waiting(self) -> int:
        """Bytes on the disk."""
        return self._written - self._read

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Forwards bytes that the rank wrote, behind its earlier ones; ``final`` also an unfinished line."""
        if not self.waiting and self._connection.unsent <= HIGH_WATER:
            self.add(self._splitter.feed(data, final=final))
        elif not self._store(data):
            self._dropped += data.count(b"\n")
        elif self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self.send_waiting())

    def _store(self, data: bytes) -> bool:
        if self.waiting + len(data) > SPOOL_LIMIT:
            return False
        done = 0
        try:
            if self._spool is None:
                # Without a name: it goes with this process.
                self._spool = tempfile.TemporaryFile("w+b", buffering=0, dir=self._scratch)
            while done < len(data):
                done += os.pwrite(self._spool.fileno(), data[done:], self._written + done)
        except OSError:
            # The next output replaces what a full disk has taken of this.
            return False
        self._written += done
        return True

    def add(self, lines: list[str]) -> None:
        """Adds complete lines to the tail and sends them, with the number of those that were dropped before."""
        # The stack of a crash must not displace the last lines of the rank.
        self._tail.extend(line[:LOG_TAIL_WIDTH] for line in lines[-2 * LOG_TAIL :] if not is_own_frame(line))
        if self._dropped and not self.waiting:
            lines = [*lines, f"rankzero: {self._dropped} log lines were dropped, the driver was too slow"]
            self._dropped = 0
        if lines:
            self._connection.send(messages.Log(lines), self._local_rank)

    async def send_waiting(self) -> None:
        """Sends the output on the disk as fast as the driver takes it, until there is none or the connection ends."""
        with contextlib.suppress(OSError):
            while self.waiting:
                await self._connection.drain()
                self.add(self._splitter.feed(self._next()))

    def _next(self) -> bytes:
        """Returns the next bytes of the file. If they cannot be read, all of it is lost and counts as one line."""
        assert self._spool is not None
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(self._spool.fileno(), min(BATCH, self.waiting), self._read)
        self._dropped += not data and self.waiting > 0
        self._read = self._read + len(data) if data else self._written
        with contextlib.suppress(OSError):
            if self._read == self._written:
                self._spool.truncate(0)
                self._read = self._written = 0
            else:
                release(self._spool.fileno(), self._read)
        return data

    def finish(self) -> None:
        """Sends the last, unfinished line, and counts the lines on the disk, for which there is no time."""
        while self.waiting:
            self._dropped += self._next().count(b"\n")
        self.add(self._splitter.feed(b"", final=True))


def release(descriptor: int, size: int) -> None:
    """Gives the blocks of the first bytes of a file back to the file system, where that can do it."""
    with contextlib.suppress(AttributeError):
        # From the beginning each time: a page of which only a part is released keeps its memory.
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size))


class LineSplitter:
    r"""Decodes UTF-8 incrementally and cuts at ``\n`` and ``\r\n``. A line that arrives in pieces is returned whole.

    A progress bar redraws its line with ``\r``. Of the texts that a redraw replaces, one in `REDRAW_INTERVAL`
    seconds of the ``clock`` becomes a line, and so does the last one. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clock = clock
        self._rest, self._draw_at = "", -math.inf

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """Returns the lines that ``data`` completes; also the last, unfinished one if it is the ``final`` data."""
        text = self._rest + self._decoder.decode(data, final)
        *lines, rest = text.split("\n")
        if final and rest:
            lines, rest = [*lines, rest], ""
        if "\r" in text:
            lines = [shown for line in lines for shown in self._drawn(line.removesuffix("\r"))]
            # A return at the end may belong to a newline.
            *drawn, last = self._drawn(rest.removesuffix("\r"))
            lines, rest = lines + drawn, last + "\r" * rest.endswith("\r")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], ""
        self._rest = rest
        return lines

    def _drawn(self, line: str) -> list[str]:
        """Returns the texts of a line that become lines although others replace them, and behind them its last one."""
        *replaced, last = [text for text in line.split("\r") if text] or [""]
        shown = []
        for text in replaced:
            if (now := self._clock()) >= self._draw_at:
                self._draw_at = now + REDRAW_INTERVAL
                shown.append(text)
        return [*shown, last]
