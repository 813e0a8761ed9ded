"""Splits the raw output of a rank into text lines."""

from __future__ import annotations

import codecs
import re

MAX_LINE = 2 << 20
"""Characters after which an unfinished line is passed on in pieces."""

_OWN_FRAME = re.compile(r'  File "(?:.*rankzero/(?:agent|host|task|warm|worker)/\w+\.py|<string>)", line \d+ in ')


def is_own_frame(line: str) -> bool:
    """Returns True for a line of faulthandler's output that shows a frame of rankzero, below the user's code."""
    return bool(_OWN_FRAME.match(line))


class LineSplitter:
    r"""Decodes UTF-8 incrementally and cuts at ``\n``, ``\r`` and ``\r\n``.

    Bytes that are not UTF-8 become U+FFFD. A progress bar that redraws itself with ``\r`` gives
    one line per redraw. A line that arrives in pieces is returned whole.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._length = 0
        self._after_return = False

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that ``data`` completes."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """Returns the lines that remain at the end of the output."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        if self._pieces:
            lines.append(self._take())
        return lines

    def _cut(self, text: str) -> list[str]:
        if self._after_return and text:
            self._after_return = False
            text = text.removeprefix("\n")
        if not text:
            return []
        self._after_return = text.endswith("\r")
        parts = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        lines = []
        for part in parts[:-1]:
            self._add(part)
            lines.append(self._take())
        self._add(parts[-1])
        if self._length > MAX_LINE:
            lines.append(self._take())
        return lines

    def _add(self, part: str) -> None:
        if part:
            self._pieces.append(part)
            self._length += len(part)

    def _take(self) -> str:
        line = "".join(self._pieces)
        self._pieces.clear()
        self._length = 0
        return line
