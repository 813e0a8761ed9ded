"""`Follower`: yields everything that is new about a run, as typed events."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rankzero.errors import WorkerFailedError, error_from_json
from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle
from rankzero.run.output import level_of
from rankzero.run.printing import print_line
from rankzero.run.status import RunStatus

REPLAY_BYTES = 1 << 20
"""Most bytes of lines of all ranks that a new follower shows again. If there are more, it shows new lines only."""

BEHIND_BYTES = 1 << 20
"""Bytes of lines, of all ranks together, by which a follower may be behind; it skips older lines.

A follower shows lines only as fast as its orchestrator stores them, about a hundred a second. A rank may print a
thousand times as many. Without the limit, the follower would still show lines long after the training has ended.
"""

LAST_BYTES = 256 << 10
"""The limit of `BEHIND_BYTES` after the end of the run, when the result waits for the follower."""


@dataclass(frozen=True)
class LineWritten:
    """A line that a rank has written, or a line about lines that were left out.

    Attributes:
        text: The line, with its ``[rank]`` prefix.
    """

    text: str

    @property
    def level(self) -> int:
        """The logging level that the line begins with; INFO for none and for DEBUG."""
        return level_of(self.text)

    def show(self, run_id: str) -> None:
        """Writes the line to standard output as the launcher does, by the logger ``rankzero.ranks``."""
        print_line(self.text, run_id)


@dataclass(frozen=True)
class MetricsReported:
    """The values that rank 0 has reported so far, after they have changed.

    Attributes:
        values: By the metric's name, the last value.
    """

    values: dict[str, Any]


@dataclass(frozen=True)
class EngineOpened:
    """The engine of the run has a web page of its own, such as Spark's UI.

    Attributes:
        url: The address of the page.
    """

    url: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended, and all its lines were yielded. No event comes after this one.

    Attributes:
        status: The final status.
    """

    status: RunStatus


Event = LineWritten | MetricsReported | EngineOpened | RunEnded


class Follower:
    """Follows a run for a pipeline step, a service or a terminal.

    Following a run renews its lease. A follower keeps the position that it has reached in the lines. If it is more than
    `BEHIND_BYTES` behind, it skips lines and yields a line that says how many bytes were left out.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: The ranks whose lines are shown; None shows all. The rank whose failure ends the run is always shown.
        attached: An earlier follower has shown lines of this run. They are shown again unless they exceed
            `REPLAY_BYTES`.

    Attributes:
        status: The status as of the last `poll`; None before the first one.

    Example:
        >>> from rankzero import Launcher
        >>> from rankzero.pipeline import Follower, LineWritten
        >>> handle = Launcher(2).submit(print, "hello")
        >>> lines = [event.text for event in Follower(handle).follow() if isinstance(event, LineWritten)]
        >>> sorted(line for line in lines if "hello" in line)
        ['[0] hello', '[1] hello']
    """

    def __init__(
        self,
        handle: RunHandle[Any],
        *,
        ranks: Collection[int] | None = None,
        attached: bool = False,
    ) -> None:
        """Reads where the lines of the run begin. Raises OSError if the store cannot be read."""
        self.status: RunStatus | None = None
        self._handle = handle
        self._ranks = None if ranks is None else frozenset(ranks)
        self._start = self._position = handle.output.start()
        if attached:
            end = handle.output.end(handle.status())
            if handle.output.begin_of_last(self._start, end, REPLAY_BYTES)[1]:
                self._position = end
        self._metrics: dict[str, Any] = {}
        self._engine_url: str | None = None

    @property
    def ended(self) -> bool:
        """True if `RunEnded` was yielded."""
        return self.status is not None and self.status.final

    def poll(self) -> Iterator[Event]:
        """Reads the run directory once and yields what is new, without waiting.

        Raises:
            OSError: the store could not be read for longer than an outage that is waited for.
            RunNotFoundError: the run directory was removed.
        """
        status = self._handle.status()
        if status.engine_url and status.engine_url != self._engine_url:
            self._engine_url = status.engine_url
            yield EngineOpened(status.engine_url)
        for line in self._lines(status):
            yield LineWritten(line)
        if status.metrics != self._metrics:
            self._metrics = status.metrics
            yield MetricsReported(status.metrics)
        self.status = status
        if status.final:
            yield RunEnded(status)

    def follow(self) -> Iterator[Event]:
        """Yields events until the run has ended, and waits between them. Raises like `poll`."""
        while True:
            yield from self.poll()
            if self.ended:
                return
            self._handle.pause()

    def _is_shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def _lines(self, status: RunStatus) -> Iterator[str]:
        """Yields the lines that were written since the last call, each with its ``[rank]``.

        With a final status, lines of the rank whose failure ended the run are added if that rank is not shown anyway.
        """
        end = None
        if self._ranks != frozenset():
            end = self._handle.output.end(status)
            yield from self._skipped(end, status)
            yield from self._shown(status, None if status.final else end)
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and error.rank is not None and not self._is_shown(error.rank):
            yield from self._lines_of_failed(error.rank, error.log_tail or [], status)

    def _shown(self, status: RunStatus, end: Position | None) -> Iterator[str]:
        for line in self._handle.output.lines(
            self._position, ranks=self._ranks, status=status, end=end, reached=self._reach
        ):
            yield line.prefixed

    def _reach(self, position: Position) -> None:
        self._position = position

    def _skipped(self, end: Position, status: RunStatus) -> Iterator[str]:
        """Moves a position that is too far behind, and yields a note about that."""
        most = LAST_BYTES if status.final else BEHIND_BYTES
        begin, left_out = self._handle.output.begin_of_last(self._position, end, most)
        if left_out:
            yield f"({left_out / (1 << 20):.1f} MiB of lines left out: rankzero logs {self._handle.directory})"
            self._position = begin
            shown = self._shown(status, end)
            if begin.offset:
                # The position may lie within a line, whose rest is dropped.
                next(shown, None)
            yield from shown

    def _lines_of_failed(self, rank: int, tail: list[str], status: RunStatus) -> Iterator[str]:
        output = self._handle.output
        if output.begin_of_last(self._start, output.end(status), REPLAY_BYTES)[1]:
            yield from (f"[{rank}] {line}" for line in tail)
        else:
            yield from (line.prefixed for line in output.lines(self._start, ranks=[rank], status=status))
