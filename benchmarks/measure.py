"""What the measurements share: timing, a table, and a file of results for `benchmarks/all.py`."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
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


def machine() -> str:
    """Names the processor, the cores, the memory and the kernel."""
    models = [
        line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores, {processor}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def commit() -> str:
    """Names the commit that is measured, with a plus sign if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


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
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "commit": commit(),
            "machine": machine(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rows": self.rows,
            "ratios": self.ratios,
        }


def _measured(report: dict[str, Any]) -> list[str]:
    if "date" not in report:
        return []
    took = f", in {report['seconds']:.0f} s" if "seconds" in report else ""
    where = f"on {report['machine']}, Python {report['python']}"
    return [f"Measured {report['date']} UTC, commit {report['commit']}, {where}{took}.", ""]


def to_markdown(report: dict[str, Any]) -> str:
    """A report as Markdown."""
    lines = [
        f"### {report['title']}",
        "",
        *_measured(report),
        "| | median | least | most | n |",
        "|---|---|---|---|---|",
    ]
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
