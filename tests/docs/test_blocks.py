"""Every block of code of the documentation is run, or marked with what it needs; these tests run those of the core.

So are the examples of docstrings. Trainings run on this machine, whatever engine a block names. `tests/airflow` and
`tests/dagster` run theirs.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.docs import blocks
from tests.docs.given import GIVEN, checkpoint, data

from rankzero.testing import run_inline

pytest_plugins = ["rankzero.testing.fixtures"]


IN_A_RANK = {"docs/training.md"}
"""Pages whose blocks show what stands in a training function."""

SLOW = {"docs/data.md"}
"""Pages whose blocks need a SparkSession."""


@pytest.fixture
def loggers() -> Iterator[None]:
    """Loggers that pages configure are afterwards as they were."""
    changed = [logging.getLogger(name) for name in (None, "rankzero", "rankzero.ranks")]
    before = [(each.level, each.propagate, list(each.filters), list(each.handlers)) for each in changed]
    yield
    for each, (level, propagate, filters, handlers) in zip(changed, before, strict=True):
        each.propagate, each.filters[:], each.handlers[:] = propagate, filters, handlers
        each.setLevel(level)


@pytest.mark.usefixtures("local_trainings", "loggers")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.soak) if page in SLOW else page for page in blocks.pages_of("docs")],
)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)

    def run() -> None:
        given = data(request.getfixturevalue("session")) if page in SLOW else GIVEN.get(page, dict)()
        blocks.run_page(page, "docs", given, request)

    if page in IN_A_RANK:
        run_inline(run, checkpoint=checkpoint())
    else:
        run()


def test_what_is_not_run_is_known() -> None:
    assert dict(Counter(block.mark for block in blocks.all_blocks() if block.mark)) == blocks.NOT_RUN


@pytest.mark.parametrize(("page", "line"), blocks.commands())
def test_the_commands_and_options_that_pages_name_exist(page: str, line: str) -> None:
    blocks.parse(line)


@pytest.mark.parametrize("name", blocks.modules_with_examples(ROOT / "core" / "rankzero"))
def test_the_examples_of_docstrings_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files beside them.
    monkeypatch.chdir(tmp_path)
    blocks.run_examples(name)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        # Else other tests of this process would have a group, too.
        dist.destroy_process_group()
