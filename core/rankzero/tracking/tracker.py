"""`Tracker`: sends the events of a run to an external system; `Rows`: the reports of ranks as metrics at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero.run.reports import STEP_NAMES, is_number

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus


class Tracker:
    """Sends the events of a run to an external system: subclass it, and pass it to ``Launcher(trackers=[...])``.

    A tracker works in the process that drives the run, in a thread of its own, and reads the run directory. It may be
    slow, hang or raise: the run neither waits for it nor fails. An exception is one line in the driver's log, and the
    tracker is called again later. When the run has ended, it has 10 s for the remaining events.

    Each run has a copy of its own: a tracker is pickled when the run is submitted, and goes to the driver directly,
    so its secrets are in no file of the run. Create objects that cannot be pickled (a client, a socket) in `begin`.

    Attributes:
        is_idempotent: True if an event may be delivered twice: events for which `add` raised, and all events of the
            training when another driver resumes it. False: each event is delivered at most once.

    Example:
        >>> import urllib.request
        >>> from rankzero import Launcher
        >>> class Pager(Tracker):
        ...     def __init__(self, url: str) -> None:
        ...         self.url = url
        ...     def add(self, run, events):
        ...         for event in events:
        ...             if event["type"] in ("failure", "restart"):
        ...                 body = f"{run.id}: {event['what']}".encode()
        ...                 urllib.request.urlopen(self.url, body, timeout=5)
        >>> launcher = Launcher(2, trackers=[Pager("http://pager.example/notify")])
    """

    is_idempotent = False

    def check(self) -> None:
        """Called when the run is submitted, before anything starts.

        Raises:
            InvalidJobError: this tracker cannot work, since a package or a setting is missing.
        """

    def begin(self, run: RunHandle[Any]) -> None:
        """Called once, before the first `add`, and again if it raised an exception.

        Args:
            run: The run: ``id``, ``directory``, ``params``, ``world_size``, ``job.labels``, ``status()``.
        """

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Called about once a second while the run lives, and once when it has ended.

        Args:
            run: The run.
            events: New events of `RunHandle.events`, in order. The list is often empty.
        """

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Called once, after the last `add`, even if that has raised an exception.

        Args:
            run: The run.
            status: Last state of the run. It is not ``final`` if another process drives the run from now on.
        """


MAX_STEP = 2**63
"""The first step that does not fit in a signed 64-bit integer."""


@dataclass(frozen=True)
class Row:
    """A report of a rank.

    Attributes:
        rank: Rank that reported.
        step: The first of ``step``, ``global_step``, ``iteration``, ``epoch`` in the report, else the report's number.
        time: Unix time of the report.
        metrics: Numbers in the report without the steps; ``nan`` and ``inf`` are included.
    """

    rank: int
    step: int
    time: float
    metrics: dict[str, float]


class Rows:
    """Converts reports to rows, and counts them to number those without a step.

    Args:
        ranks: Ranks whose reports are converted; None for all.
    """

    def __init__(self, ranks: Collection[int] | None) -> None:
        self._ranks = ranks
        self._reports: Counter[int] = Counter()

    def of(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
        """Yields the rows of the reports among the next events."""
        for event in events:
            if event["type"] != "metric" or (self._ranks is not None and event["rank"] not in self._ranks):
                continue
            rank, found = event["rank"], event["metrics"]
            self._reports[rank] += 1
            step = next((found[name] for name in STEP_NAMES if _is_step(found.get(name))), self._reports[rank])
            metrics = {
                name: float(value)
                for name, value in found.items()
                if (isinstance(value, float) or is_number(value)) and name not in STEP_NAMES
            }
            yield Row(rank, int(step), event["time"], metrics)


def _is_step(value: object) -> bool:
    """Returns False for a step that no system can store: the report would be refused and sent repeatedly."""
    return is_number(value) and abs(value) < MAX_STEP
