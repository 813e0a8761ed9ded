"""docs/limits.md: its numbers are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.docs.pages import text_of

PAGE = text_of("docs/limits.md")
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
IN_ROWS = re.findall(r"^\|.+?\| (\d+) ?(\w*) \|.*\| `(rankzero[\w.]+)` \|$", PAGE, re.M)
IN_SENTENCES = re.findall(r"(\d+)(?: (s|KiB|MiB|GiB)\b)?[a-z\s]*\(`(rankzero[\w.]+)`\)", PAGE)
HOUR = 3600.0
ENDS = ("SHORTEST", "LONGEST")


def constant(name: str) -> Any:
    """The value of a constant, read from the source of its module."""
    module, _, variable = name.rpartition(".")
    file = Path(ROOT / "core", *module.split(".")).with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [variable]:
            return eval(compile(ast.Expression(node.value), str(file), "eval"), {})
    raise AssertionError(f"{name} is no constant")


@pytest.mark.parametrize(("number", "unit", "name"), [*IN_ROWS, *IN_SENTENCES])
def test_a_number_is_that_of_its_constant(number: str, unit: str, name: str) -> None:
    assert int(number) * UNITS[unit] == constant(name)


def test_every_constant_that_the_page_names_has_its_number_there() -> None:
    named = re.findall(r"`(rankzero\.[\w.]+\.[A-Z_]+)`", PAGE)
    assert sorted(named) == sorted(name for _, _, name in [*IN_ROWS, *IN_SENTENCES])


def test_requests_per_hour_follow_from_the_interval_between_two_writes() -> None:
    share, shortest, longest = map(
        constant, ("rankzero.run.status._SHARE", *(f"rankzero.bounds.{one}_PACE" for one in ENDS))
    )

    def times(begin: float, end: float) -> int:
        count = 0
        while begin < end:
            begin, count = begin + min(max(begin * share, shortest), longest), count + 1
        return count

    rows = re.findall(r"^\|.+?, ([\d.]+) requests each time \| (\d+) \| (\d+) \|$", PAGE, re.M)
    assert len(rows) == 2
    for requests, first, later in rows:
        assert int(first) == pytest.approx(float(requests) * times(0, HOUR), rel=0.01)
        assert int(later) == pytest.approx(float(requests) * times(HOUR, 2 * HOUR), rel=0.01)
        assert f"| {requests} |" in text_of("docs/performance.md"), "as they were counted"
