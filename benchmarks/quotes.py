"""Numbers of ``results.json`` that pages of the docs quote.

A page marks a quoted number with two comments, which no reader sees: ``<!--bench launch: torchrun-->2.7 s<!--/-->``
names a report and a row of it, or one of the values that it holds against a target. `benchmarks/all.py` and
``python benchmarks/quotes.py`` write the numbers into the pages, the build of the site reads them itself, and a test
fails where a page has another number.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
QUOTE = re.compile(r"(<!--bench (\w+): (.+?)-->).*?(<!--/-->)")
DIGITS = 3
"""Significant digits of a quoted number."""


def load() -> dict[str, Any]:
    """Returns the reports, by name."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def value_of(results: dict[str, Any], report: str, what: str) -> str:
    """Returns a number as pages show it. Raises KeyError if no report has it."""
    for row in results[report]["rows"]:
        if row["what"] == what:
            return f"{number(row['median'])} {row['unit']}".strip()
    for ratio in results[report]["ratios"]:
        if ratio["what"] == what:
            return number(ratio["value"])
    raise KeyError(f"{report}: {what}")


def number(value: float) -> str:
    """Returns a number with `DIGITS` significant digits, without an exponent."""
    rounded = float(f"{value:.{DIGITS}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.12f}".rstrip("0").rstrip(".")


def quoted(text: str, results: dict[str, Any]) -> str:
    """Returns a page with each quoted number as the results have it."""
    return QUOTE.sub(lambda found: found[1] + value_of(results, found[2], found[3]) + found[4], text)


def write(results: dict[str, Any]) -> None:
    """Writes the numbers into the pages."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        before = page.read_text()
        if (after := quoted(before, results)) != before:
            page.write_text(after)


if __name__ == "__main__":
    write(load())
