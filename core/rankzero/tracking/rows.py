"""`Rows`: the reports of ranks, as metrics at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rankzero.run.reports import STEP_NAMES, is_number

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
