"""What the measurements share: timing, a table, and a file of results for `benchmarks/all.py`."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RESULTS_VARIABLE = "RANKZERO_BENCHMARK_RESULTS"
"""Directory into which `Report.finish` writes ``NAME.json``; nothing is written without it."""


def timed(action: Callable[[], object], runs: int = 1) -> list[float]:
    """Seconds of each run of an action."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds


@dataclass
class Report:
    """A table of measured values, and ratios between them with the targets they are held against."""

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, values: Sequence[float], unit: str = "s") -> float:
        """Adds a row; returns the median."""
        median = statistics.median(values)
        self.rows.append(
            {"what": what, "unit": unit, "median": median, "least": min(values), "most": max(values), "n": len(values)}
        )
        print(f"  {what}: {median:.4g} {unit} ({min(values):.4g} to {max(values):.4g}, {len(values)})", flush=True)
        return median

    def hold(self, what: str, value: float, target: float, *, at_least: bool = False) -> None:
        """Adds a value with its target."""
        met = value >= target if at_least else value <= target
        self.ratios.append({"what": what, "value": value, "target": target, "at_least": at_least, "met": met})

    def finish(self) -> None:
        """Prints the table, and writes it where `RESULTS_VARIABLE` says."""
        print(to_markdown(self.to_json()))
        if directory := os.environ.get(RESULTS_VARIABLE):
            with open(os.path.join(directory, f"{self.name}.json"), "w") as file:
                json.dump(self.to_json(), file, indent=1)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "title": self.title,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rows": self.rows,
            "ratios": self.ratios,
        }


def to_markdown(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    lines = [f"### {report['title']}", "", "| | median | least | most | n |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        numbers = " | ".join(f"{row[key]:.4g} {row['unit']}" for key in ("median", "least", "most"))
        lines.append(f"| {row['what']} | {numbers} | {row['n']} |")
    if report["ratios"]:
        lines += ["", "| | measured | target | met |", "|---|---|---|---|"]
        for ratio in report["ratios"]:
            sign = "at least" if ratio["at_least"] else "at most"
            met = "yes" if ratio["met"] else "no"
            lines.append(f"| {ratio['what']} | {ratio['value']:.3g} | {sign} {ratio['target']:g} | {met} |")
    return "\n".join(lines) + "\n"
