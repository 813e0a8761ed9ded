"""`LogCursor` records how far a follower has shown the ranks' lines, and where the next follower continues."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rankzero.errors import WorkerFailedError, error_from_json
from rankzero.run.directory import RunStatus
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.store import is_url

REPLAY_BYTES = 256 << 10
"""Most bytes of a rank's lines that a new follower shows again. If there are more, it shows new lines only."""

REPLAY_BYTES_SHARED = 1 << 20
"""The limit of `REPLAY_BYTES` on an object store, where it applies to the lines of all ranks together."""


BEHIND_BYTES = 1 << 20
"""Bytes of lines, of all shown ranks together, by which a follower may be behind; it skips older lines.

A follower shows lines only as fast as its orchestrator stores them, about a hundred a second. A rank may print a
thousand times as many. Without the limit, the follower would still show lines long after the training has ended.
"""

LAST_BYTES = 256 << 10
"""The limit of `BEHIND_BYTES` after the end of the run, when the result waits for the follower."""

_LEAST_SHARE = 4 << 10


class LogCursor:
    """Reads the new lines of the shown ranks, and keeps the position that it has reached for each of them.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: Ranks whose lines are shown; None for all. The rank whose failure ended the run is also shown.
        attached: True if another follower came before. Its lines are shown again unless they exceed `REPLAY_BYTES`.
        whole: True if no line may be skipped, since lines carry messages.
    """

    def __init__(
        self,
        handle: RunHandle[Any],
        *,
        ranks: Collection[int] | None = None,
        attached: bool = False,
        whole: bool = False,
    ) -> None:
        self._handle = handle
        self._whole = whole
        self._is_remote = is_url(handle.directory)
        self._ranks = None if ranks is None else frozenset(ranks)
        self._starts = handle.log_starts()
        positions = self._starts
        if attached:
            ends = handle.log_ends()
            positions = {
                rank: start if self._is_near(start, ends[rank]) else ends[rank] for rank, start in positions.items()
            }
        self._positions = {rank: start for rank, start in positions.items() if self._is_shown(rank)}

    def _is_shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def lines(self, status: RunStatus) -> Iterator[str]:
        """Yields the lines that were written since the last call, each with its ``[rank]``.

        Args:
            status: Status of the run, read before this call. With a final status, lines of the rank whose failure ended
                the run are added if that rank is not among the shown ones.
        """
        ends = None
        if not self._whole and self._positions:
            ends = self._handle.log_ends(self._positions, status)
            yield from self._skipped(ends, status)
        if status.final or self._is_remote:
            # A file server may still report an old size, so the files are read to their ends.
            ends = None
        yield from self._handle.lines(self._positions, follow=False, prefix=True, status=status, ends=ends)
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and error.rank is not None and not self._is_shown(error.rank):
            yield from self._lines_of_failed(error.rank, error.log_tail or [])

    def _skipped(self, ends: Mapping[int, Position], status: RunStatus) -> Iterator[str]:
        """Moves positions that are too far behind. Yields a note for each, and the lines from the new position on."""
        most = LAST_BYTES if status.final else BEHIND_BYTES
        if not self._is_remote:
            most = max(most // len(self._positions), _LEAST_SHARE)
        # On an object store all ranks share a stream.
        for rank in [min(self._positions)] if self._is_remote else sorted(self._positions):
            begin, left_out = self._handle.begin_of_last(self._positions[rank], ends[rank], most)
            if not left_out:
                continue
            moved = dict.fromkeys(self._positions, begin) if self._is_remote else {rank: begin}
            self._positions.update(moved)
            size = f"{left_out / (1 << 20):.1f} MiB"
            whose = "" if self._is_remote else f"[{rank}] "
            yield f"{whose}({size} of lines left out: rankzero logs {self._handle.directory})"
            lines = self._handle.lines(moved, follow=False, prefix=True, status=status, ends=ends)
            if begin.offset:
                # The position may lie within a line, whose rest is dropped.
                next(lines, None)
            yield from lines
            self._positions.update(moved)

    def _lines_of_failed(self, rank: int, tail: list[str]) -> Iterator[str]:
        start = self._starts[rank]
        if self._is_near(start, self._handle.log_ends()[rank]):
            yield from self._handle.lines({rank: start}, follow=False, prefix=True)
        else:
            yield from (f"[{rank}] {line}" for line in tail)

    def _is_near(self, start: Position, end: Position) -> bool:
        most = REPLAY_BYTES_SHARED if self._is_remote else REPLAY_BYTES
        return end.piece <= start.piece and end.offset - start.offset <= most
