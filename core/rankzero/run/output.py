"""The lines and events of a run, read from given positions on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rankzero import bounds
from rankzero.job import Job
from rankzero.run import pieces
from rankzero.run.directory import RunDirectory
from rankzero.run.growing import Position
from rankzero.run.lines import Line, LineReader, Patience
from rankzero.run.names import EVENTS, LINES
from rankzero.run.observer import Observer
from rankzero.run.status import RunStatus


class Output:
    """Reads what the ranks and the driver of a run have written, for a `RunHandle` and for what follows one."""

    def __init__(
        self,
        run: RunDirectory,
        observer: Observer,
        job: Job | None,
        read: Patience,
        polls: Callable[[], Iterator[RunStatus]],
    ) -> None:
        """Prepares to read, and reads nothing yet.

        Args:
            run: The run directory.
            observer: Reads the store patiently.
            job: Job of the handle's submission; None for the last one.
            read: Calls a function that reads the store, as a follower of the run does.
            polls: Returns an iterator with a status for every poll of the run until its end.
        """
        self._run = run
        self._observer = observer
        self._job = job
        self._read = read
        self._polls = polls
        self._lines = LineReader(run, read)

    def ends(self, ranks: Iterable[int] | None = None, status: RunStatus | None = None) -> dict[int, Position]:
        """Returns the current ends of ranks' lines. `lines` from there on yields the lines that are written later.

        Args:
            ranks: The ranks; None for all.
            status: A status that was just read, which saves a request to an object store.
        """
        ranks = range(self._observer.patiently(self._run.job).num_processes) if ranks is None else ranks
        return self._lines.ends(ranks, status or self._observer.patiently(self._run.status))

    def starts(self) -> dict[int, Position]:
        """Returns the positions at which the lines of the last submission begin, by rank."""
        job = self._job or self._observer.patiently(self._run.job)
        return {rank: Position(*job.log_starts.get(str(rank), ())) for rank in range(job.num_processes)}

    def begin_of_last(self, start: Position, end: Position, most: int) -> tuple[Position, int]:
        """Returns the position of the last ``most`` bytes between two positions, and the number of bytes before it."""
        location = self._run.path(LINES)
        return self._read(lambda: pieces.begin_of_last(location, start, end, most))

    def lines(
        self,
        positions: dict[int, Position],
        follow: bool,
        *,
        prefix: bool,
        status: RunStatus | None = None,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[str]:
        """Yields the lines of some ranks from given positions on. `logs` is built on this method.

        Args:
            positions: The position to read from, by rank. Updated as lines are read.
            follow: Continues until the run ends.
            prefix: Begins each line with ``[rank]``.
            status: Without ``follow``: a status that was just read, which saves requests to an object store.
            ends: Without ``follow``, on a disk: the position at which to stop, by rank.
        """
        for line in self.timed_lines(positions, follow, status=status, ends=ends):
            yield line.prefixed if prefix else line.text

    def timed_lines(
        self,
        positions: dict[int, Position],
        follow: bool,
        *,
        status: RunStatus | None = None,
        ends: Mapping[int, Position] | None = None,
    ) -> Iterator[Line]:
        """Yields lines as `lines` does, each with its rank and its time."""
        if not follow:
            yield from self._lines.of_ranks(positions, _running(status), ends=ends)
            return
        thorough_at = 0.0
        for found in self._polls():
            thorough = found.final or time.monotonic() >= thorough_at
            if thorough:
                thorough_at = time.monotonic() + bounds.THOROUGH_INTERVAL
            yield from self._lines.of_ranks(positions, _running(found), thorough=thorough)

    def read_events(self, position: Position, status: RunStatus | None = None) -> tuple[list[dict[str, Any]], Position]:
        """Returns some events from a position on, and the new position, which is unchanged if there are no more events.

        Args:
            position: The position to read from; ``Position()`` is the beginning.
            status: A status that was just read, which saves requests to an object store.
        """
        lines, position = self._lines.of_file(EVENTS, position, _running(status))
        events = []
        for line in lines:
            # A line that was cut by a full disk is not JSON.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events, position

    def tails(self, ranks: Iterable[int], size: int) -> dict[int, tuple[list[Line], bool]]:
        """Returns the last lines of some ranks in the last submission.

        Args:
            ranks: The ranks.
            size: Approximate number of bytes for each rank. On an object store, where all ranks share one stream, only
                its last pieces are read.

        Returns:
            The lines, and whether there are earlier ones, by rank.
        """
        starts, status = self.starts(), self._observer.patiently(self._run.status)
        return self._lines.tails({rank: starts[rank] for rank in ranks}, size, status, _running(status))


def _running(status: RunStatus | None) -> RunStatus | None:
    """Returns the status of a running run, else None: a driver that died may have written more than it recorded."""
    return None if status is None or status.final else status
