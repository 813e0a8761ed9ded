"""`LogCursor`: how far a follower has shown what the ranks write, and where the next one goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rankzero.errors import WorkerFailedError, error_from_json
from rankzero.run.directory import RunStatus
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.store import is_url

REPLAY_BYTES = 256 << 10
"""Bytes of a rank's lines that are shown again rather than left out."""

REPLAY_BYTES_SHARED = 1 << 20
"""The same on an object store, where it is the lines of all ranks."""


BEHIND_BYTES = 1 << 20
"""Bytes of lines, of all shown ranks together, by which a follower may be behind; it skips what is more.

A follower shows lines at the rate at which its orchestrator stores them, some hundred a second, and a rank may print a
thousand times as many. The follower would fall behind for the whole training, and hold its end back.
"""

LAST_BYTES = 256 << 10
"""The same once the run has ended: the result is waiting."""

_LEAST_SHARE = 4 << 10


class LogCursor:
    """Where each rank's lines have been read to, for the ranks that are shown.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: Whose lines are shown; None for all. The rank whose failure ended the run is shown with them.
        attached: Another follower came before: what it has shown is not shown again if it is much.
        whole: Every line is shown, whatever the follower is behind: lines carry messages.
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
        """What has been written since the last look, each line with its ``[rank]``.

        Args:
            status: The run's, asked for before this: a final one adds the lines of the rank whose failure has ended the
                run, if they were not shown.
        """
        ends = None
        if not self._whole and self._positions:
            ends = self._handle.log_ends(self._positions, status)
            yield from self._skipped(ends, status)
        if status.final or self._is_remote:
            # A file server may not have told of the last lines.
            ends = None
        yield from self._handle.lines(self._positions, follow=False, prefix=True, status=status, ends=ends)
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and error.rank is not None and not self._is_shown(error.rank):
            yield from self._lines_of_failed(error.rank, error.log_tail or [])

    def _skipped(self, ends: Mapping[int, Position], status: RunStatus) -> Iterator[str]:
        """Moves the positions of what is too far behind; yields a line for each, and what follows it."""
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
                # The rest of a line.
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
