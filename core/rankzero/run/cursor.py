"""`LogCursor`: how far a follower has shown what the ranks write, and where the next one goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rankzero.errors import WorkerFailedError, error_from_json
from rankzero.run.directory import RunStatus
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle

REPLAY_BYTES = 256 << 10
"""Bytes of a rank's lines that are shown again rather than left out."""

REPLAY_PIECES = 30
"""The same for a run directory on an object store, in pieces of some seconds each."""


class LogCursor:
    """Where each rank's lines have been read to, for the ranks that are shown.

    Args:
        handle: The run.
        since: Where each rank's lines ended before this training; a rank that is not there began with nothing.
        ranks: Whose lines are shown; None for all. The rank whose failure ended the run is shown with them.
        attached: The run was not started by this follower: what an earlier one has shown is not shown again if it is
            much.
    """

    def __init__(
        self,
        handle: RunHandle[Any],
        since: Mapping[int, Position] | None = None,
        *,
        ranks: Collection[int] | None = None,
        attached: bool = False,
    ) -> None:
        self._handle = handle
        self._since = dict(since or {})
        self._ranks = None if ranks is None else frozenset(ranks)
        ends = handle.ends()
        starts = {rank: self._since.get(rank, Position()) for rank in ends}
        if attached:
            starts = {rank: start if _is_near(start, ends[rank]) else ends[rank] for rank, start in starts.items()}
        self._positions = {rank: start for rank, start in starts.items() if self._is_shown(rank)}

    def _is_shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def lines(self, status: RunStatus) -> Iterator[str]:
        """What has been written since the last look, each line with its ``[rank]``.

        Args:
            status: The run's, asked for before this: a final one adds the lines of the rank whose failure has ended the
                run, if they were not shown.
        """
        yield from self._handle.lines(self._positions, follow=False, prefix=True)
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and error.rank is not None and not self._is_shown(error.rank):
            yield from self._lines_of_failed(error.rank, error.log_tail or [])

    def _lines_of_failed(self, rank: int, tail: list[str]) -> Iterator[str]:
        start = self._since.get(rank, Position())
        if _is_near(start, self._handle.ends()[rank]):
            yield from self._handle.lines({rank: start}, follow=False, prefix=True)
        else:
            yield from (f"[{rank}] {line}" for line in tail)

    def to_json(self) -> dict[str, list[int]]:
        """Where the lines of this training begin, as JSON."""
        return {str(rank): [position.piece, position.offset] for rank, position in self._since.items()}


def positions_from_json(data: Mapping[str, list[int]]) -> dict[int, Position]:
    """``since`` from `LogCursor.to_json`."""
    return {int(rank): Position(*numbers) for rank, numbers in data.items()}


def _is_near(start: Position, end: Position) -> bool:
    return end.piece - start.piece <= REPLAY_PIECES and end.offset - start.offset <= REPLAY_BYTES
