"""`LogCursor`: how far a follower has shown what the ranks write, and where the next one goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


class LogCursor:
    """Where each rank's lines have been read to, for the ranks that are shown.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: Whose lines are shown; None for all. The rank whose failure ended the run is shown with them.
        attached: Another follower came before: what it has shown is not shown again if it is much.
    """

    def __init__(self, handle: RunHandle[Any], *, ranks: Collection[int] | None = None, attached: bool = False) -> None:
        self._handle = handle
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
        yield from self._handle.lines(self._positions, follow=False, prefix=True, status=status)
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and error.rank is not None and not self._is_shown(error.rank):
            yield from self._lines_of_failed(error.rank, error.log_tail or [])

    def _lines_of_failed(self, rank: int, tail: list[str]) -> Iterator[str]:
        start = self._starts[rank]
        if self._is_near(start, self._handle.log_ends()[rank]):
            yield from self._handle.lines({rank: start}, follow=False, prefix=True)
        else:
            yield from (f"[{rank}] {line}" for line in tail)

    def _is_near(self, start: Position, end: Position) -> bool:
        most = REPLAY_BYTES_SHARED if is_url(self._handle.directory) else REPLAY_BYTES
        return end.piece <= start.piece and end.offset - start.offset <= most
