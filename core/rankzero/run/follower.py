"""`Follower`: yields everything that is new about a run, as typed events."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from rankzero.errors import WorkerFailedError, error_from_json
from rankzero.run.directory import LINES
from rankzero.run.handle import RunHandle
from rankzero.run.lines import parsed, print_line
from rankzero.run.status import RunStatus

# A follower shows lines only as fast as its orchestrator stores them, about a hundred a second, and a rank may print a
# thousand times as many. Without a limit it would still show lines long after the training has ended.
BEHIND_BYTES = 256 << 10  # Bytes of lines of all ranks by which a follower may be behind; it skips older lines


class LineWritten(NamedTuple):
    """A line that a rank has written, with its ``[rank]`` prefix, or a line about lines that were left out."""

    text: str

    def show(self, run_id: str) -> None:
        """Writes the line to standard output as the launcher does, by the logger ``rankzero.ranks``."""
        print_line(self.text, run_id)


class MetricsReported(NamedTuple):
    """The last values by name of the metrics that rank 0 has reported so far, after they have changed."""

    values: dict[str, Any]


class EngineOpened(NamedTuple):
    """The address of a web page of the run's engine, such as Spark's UI."""

    url: str


Event = LineWritten | MetricsReported | EngineOpened


class Follower:
    """Follows a run for a pipeline step, a service or a terminal.

    Following a run renews its lease. A follower that is more than `BEHIND_BYTES` behind skips lines, and yields a line
    that says so.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: The ranks whose lines are shown; None shows all. Of the rank whose failure ends the run, the last lines
            are always shown.

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

    def __init__(self, handle: RunHandle[Any], *, ranks: Collection[int] | None = None) -> None:
        """Prepares to follow a run, and reads nothing yet."""
        self.status: RunStatus | None = None
        self._handle = handle
        self._ranks = None if ranks is None else frozenset(ranks)
        self._stream = handle.stream(LINES, earlier=False)
        self._metrics: dict[str, Any] = {}
        self._engine_url: str | None = None

    @property
    def ended(self) -> bool:
        """True once the run has ended, and all its events were yielded."""
        return self.status is not None and self.status.final

    def poll(self) -> Iterator[Event]:
        """Reads the run directory once and yields what is new, without waiting.

        Raises:
            OSError: the store could not be read for longer than an outage that is waited for.
            RunNotFoundError: the run directory was removed.
        """
        status = self._handle.status()
        self._handle.renew_if_due()
        if status.engine_url and status.engine_url != self._engine_url:
            self._engine_url = status.engine_url
            yield EngineOpened(status.engine_url)
        yield from map(LineWritten, self._lines(status))
        if status.metrics != self._metrics:
            self._metrics = status.metrics
            yield MetricsReported(status.metrics)
        self.status = status

    def follow(self) -> Iterator[Event]:
        """Yields events until the run has ended, and waits between them. Raises like `poll`."""
        while True:
            yield from self.poll()
            if self.ended:
                return
            self._handle.pause()

    def _lines(self, status: RunStatus) -> Iterator[str]:
        if self._ranks != frozenset():
            if self._stream.skip(self._stream.end(status), BEHIND_BYTES):
                yield f"(older lines were left out: rankzero logs {self._handle.directory})"
            for line in parsed(self._stream.new(status), self._ranks):
                # Whoever shows the lines may be slow.
                self._handle.renew_if_due()
                yield line.prefixed
        error = error_from_json(status.error) if status.error else None
        if isinstance(error, WorkerFailedError) and self._ranks is not None and error.rank not in (None, *self._ranks):
            yield from (f"[{error.rank}] {line}" for line in error.log_tail or [])
