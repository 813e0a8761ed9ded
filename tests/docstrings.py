"""Runs the examples in the docstrings of a package: each is a promise."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

from tests.loading import load_module

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules_with_examples(package: Path) -> list[str]:
    """Names of the modules below a package's folder that have an example."""
    files = [path for path in sorted(package.rglob("*.py")) if ">>> " in path.read_text()]
    dotted = [path.relative_to(package.parent).with_suffix("").parts for path in files]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in dotted]


def run_examples(name: str) -> None:
    """Runs every example of a module, which sees what the module sees. Raises AssertionError with what differed."""
    module: ModuleType = load_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
