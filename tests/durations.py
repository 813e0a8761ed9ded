"""How long each file of tests takes: which come first, and which are fast.

A pytest plugin, which `tests/conftest.py` loads. ``make durations`` measures the files anew, with the whole suite.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.schedule import scope_of

FILE = Path(__file__).with_suffix(".json")

FAST = 5.0
"""Seconds that a file may take to belong to ``make test-fast``: less than a JVM or a deployment needs to start."""

UNKNOWN = 60.0
"""Seconds that a file without a measurement counts: it comes early, since all processes wait for a long file that comes
last."""


@functools.cache
def known() -> dict[str, float]:
    """Returns the seconds of each file that has been measured."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}  # type: ignore[no-any-return]


def file_of(nodeid: str) -> str:
    """Returns the path of the file that a test is in."""
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("durations of rankzero's suite")
    group.addoption("--fast", action="store_true", help=f"only files that take less than {FAST:g} s")
    group.addoption("--measure", action="store_true", help=f"write {FILE.name}, which orders the files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves slow files out where asked to: they are not even imported."""
    root = FILE.parents[1]
    if not (config.getoption("--fast") and collection_path.is_relative_to(root)):
        return None
    return known().get(collection_path.relative_to(root).as_posix(), 0.0) >= FAST or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest groups first where several processes share them."""
    if hasattr(config, "workerinput"):
        seconds = known()
        groups: Counter[str] = Counter()
        for path in {file_of(item.nodeid) for item in items}:
            groups[scope_of(path)] += seconds.get(path, UNKNOWN)
        items.sort(key=lambda item: (-groups[scope_of(item.nodeid)], scope_of(item.nodeid), file_of(item.nodeid)))


class Durations:
    """Sums the durations of tests by file, and writes them at the end."""

    def __init__(self) -> None:
        """Begins without any."""
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test."""
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        measured = {**known(), **{path: round(seconds, 1) for path, seconds in self._seconds.items()}}
        there = {path: seconds for path, seconds in sorted(measured.items()) if (FILE.parents[1] / path).exists()}
        FILE.write_text(json.dumps(there, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Measures in the process that starts the others."""
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "rankzero-durations")
