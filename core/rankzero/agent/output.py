"""Splits the output of a rank into lines and forwards them to the driver.

A rank never blocks on it, and lines that are dropped are counted.
While the driver keeps up, each line is sent immediately. When it is behind, lines are gathered into larger messages.
When more than `HIGH_WATER` bytes wait, lines are spooled to this host's disk and sent later, in order.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable
from io import FileIO

from rankzero import bounds
from rankzero.bounds import LOG_TAIL, LOG_TAIL_WIDTH
from rankzero.channel import messages
from rankzero.channel.client import ChannelClient

REDRAW_INTERVAL = 10.0  # Seconds in which one redraw of a progress bar becomes a line: below 1000 an hour for two ranks
HIGH_WATER = 8 << 20  # Bytes waiting for the driver above which lines are spooled to disk
BEHIND = 32 << 10  # Bytes in flight to the driver above which it counts as behind: each message costs it processor time
BATCH = 256 << 10  # Characters of lines that are gathered into one message when the driver is behind
SPOOL_LIMIT = 8 << 30  # Bytes of one rank's spool on disk above which lines are dropped and counted

_BLOCK = 1 << 20

QUIET_BYTES = 40 << 10
"""Most bytes of output in about two `DELIVERY_INTERVAL` of a quiet rank: the smallest usual pipe holds 64 KiB."""

MAX_LINE = 2 << 20  # Characters after which an unfinished line is passed on in pieces

_OWN_FRAME = re.compile(r'  File "(?:.*rankzero/(?:agent|host|task|worker)/\w+\.py|<string>)", line \d+ in ')


class RankOutput:
    """Splits a rank's output into lines, keeps the last ones, and forwards all to the driver."""

    def __init__(self, local_rank: int, client: ChannelClient, scratch: str) -> None:
        self._local_rank = local_rank
        self._client = client
        self._path = os.path.join(scratch, f"rank-{local_rank}.spool")
        self._splitter = LineSplitter()
        self._spool: FileIO | None = None
        self._read = self._written = 0
        self._gathered: list[str] = []
        self._length = 0
        self._gathered_since = 0.0
        self._dropped = 0
        self._tail: deque[str] = deque(maxlen=LOG_TAIL)
        self._recent = 0.0
        self._fed_at = 0.0

    @property
    def tail(self) -> list[str]:
        """The last lines of the rank, oldest first."""
        return list(self._tail)

    @property
    def is_quiet(self) -> bool:
        """True if the rank has printed so little lately that its next lines may wait for `DELIVERY_INTERVAL`."""
        return self._recent < QUIET_BYTES

    @property
    def waiting(self) -> int:
        """Approximate bytes not yet queued for the driver: spooled on disk or gathered."""
        return self._on_disk + self._length

    @property
    def _on_disk(self) -> int:
        return self._written - self._read

    def feed(self, data: bytes) -> None:
        """Adds bytes that the rank wrote."""
        now = time.monotonic()
        self._recent = self._recent * 0.5 ** ((now - self._fed_at) / bounds.DELIVERY_INTERVAL) + len(data)
        self._fed_at = now
        self.add(self._splitter.feed(data))

    def finish(self) -> None:
        """Flushes the last, unfinished line once the rank's output has ended."""
        self.add(self._splitter.finish())
        if not self._on_disk:
            self._send(self._take_gathered())

    def add(self, lines: list[str]) -> None:
        """Adds complete lines to the tail and forwards them."""
        if not lines:
            return
        # The stack of a crash must not displace the last lines of the rank.
        self._tail.extend(line[:LOG_TAIL_WIDTH] for line in lines[-2 * LOG_TAIL :] if not is_own_frame(line))
        if not self._gathered:
            self._gathered_since = time.monotonic()
        self._gathered += lines
        self._length += len(lines) + sum(map(len, lines))
        if self._on_disk or self._client.bulk_bytes > HIGH_WATER:
            self._store(self._take_gathered())
        elif self._may_send():
            self._send(self._take_gathered())

    def _may_send(self) -> bool:
        """Returns True if the gathered lines are many or old, or the driver is not behind."""
        is_old = time.monotonic() - self._gathered_since >= bounds.DELIVERY_INTERVAL
        # Received bytes may not be accepted yet, and queued bytes are not even sent: the larger number counts.
        on_their_way = max(self._client.bulk_bytes, self._client.unaccepted)
        return is_old or self._length >= BATCH or on_their_way <= BEHIND

    def _take_gathered(self) -> list[str]:
        lines, self._gathered, self._length = self._gathered, [], 0
        return lines

    def pump(self) -> None:
        """Sends waiting lines to the driver, as far as it keeps up."""
        if self._gathered and self._may_send():
            self._send(self._take_gathered())
        while self._on_disk and self._client.bulk_bytes <= HIGH_WATER:
            self._send(self._read_spool())
        if self._written and not self._on_disk:
            self._empty_spool()

    def drop_rest(self) -> None:
        """Drops and counts the lines that still wait, because the time for their delivery is over."""
        self._dropped += len(self._take_gathered())
        while self._on_disk:
            self._dropped += len(self._read_spool())
        self._send([])

    def _send(self, lines: list[str]) -> None:
        if self._dropped:
            lines = [*lines, f"rankzero: {self._dropped} log lines were dropped, the driver was too slow"]
            self._dropped = 0
        if lines:
            self._client.queue(messages.encode(messages.Log(lines), self._local_rank), bulk=True)

    def _store(self, lines: list[str]) -> None:
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
        try:
            if self._written + len(data) > SPOOL_LIMIT:
                raise OSError("the limit of lines on disk is reached")
            if self._spool is None:
                self._spool = open(self._path, "w+b", buffering=0)
            done = 0
            while done < len(data):
                done += os.pwrite(self._spool.fileno(), data[done:], self._written + done)
        except OSError:
            # The next lines replace what a full disk has taken of these.
            self._dropped += len(lines)
        else:
            self._written += len(data)

    def _read_spool(self) -> list[str]:
        """Takes the next lines from the disk. Lines that cannot be read are dropped and counted as one."""
        size, block, end = _BLOCK, b"", 0
        with contextlib.suppress(OSError):
            while self._spool and not end and len(block) < self._on_disk:
                block = os.pread(self._spool.fileno(), min(size, self._on_disk), self._read)
                end = block.rfind(b"\n") + 1
                if len(block) < min(size, self._on_disk):
                    break
                size *= 2
        if not end:
            self._read = self._written
            self._dropped += 1
        self._read += end
        return block[:end].decode("utf-8", "replace").split("\n")[:-1]

    def _empty_spool(self) -> None:
        self._read = self._written = 0
        with contextlib.suppress(OSError):
            if self._spool:
                self._spool.truncate(0)


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
