"""`Follower`: yields everything that is new about a run, as typed events."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rankzero.run.cursor import LogCursor
from rankzero.run.directory import RunStatus
from rankzero.run.handle import RunHandle


@dataclass(frozen=True)
class LineWritten:
    """A line that a rank has written, or a line about lines that were left out.

    Attributes:
        text: The line, with its ``[rank]`` prefix.
    """

    text: str


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

    Following a run renews its lease. A follower that is far behind skips lines and yields a line that says how many
    bytes were left out, unless ``whole`` is set.

    Args:
        handle: The run. Lines of its earlier submissions are not shown.
        ranks: The ranks whose lines are shown; None shows all. The rank whose failure ends the run is always shown.
        attached: An earlier follower has shown lines of this run; many of them are not shown a second time.
        whole: Shows every line, however many they are.

    Attributes:
        status: The status as of the last `poll`; None before the first one.

    Example:
        >>> from rankzero import Launcher
        >>> from rankzero.pipeline import Follower, LineWritten
        >>> handle = Launcher(2).submit(print, "hello")
        >>> lines = [event.text for event in Follower(handle).follow() if isinstance(event, LineWritten)]
        >>> sorted(lines)
        ['[0] hello', '[1] hello']
    """

    def __init__(
        self,
        handle: RunHandle[Any],
        *,
        ranks: Collection[int] | None = None,
        attached: bool = False,
        whole: bool = False,
    ) -> None:
        """Reads where the lines of the run begin. Raises OSError if the store cannot be read."""
        self.status: RunStatus | None = None
        self._handle = handle
        self._cursor = LogCursor(handle, ranks=ranks, attached=attached and not whole, whole=whole)
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
        for line in self._cursor.lines(status):
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
