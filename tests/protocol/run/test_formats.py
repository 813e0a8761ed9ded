"""Run directories of other versions of rankzero are refused by the number of their format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import submitted

from rankzero import InvalidJobError, Launcher, RunHandle, RunNotFoundError
from rankzero.job import FORMAT


@pytest.mark.parametrize("number", [2, FORMAT + 1])
def test_another_format_is_refused_by_its_number(number: int, tmp_path: Path) -> None:
    own = submitted(str(tmp_path / "nightly"))
    path = Path(own.run.job_path(0))
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    message = f"has format {number}, and this version of rankzero reads format {FORMAT}"
    with pytest.raises(RunNotFoundError, match=message):
        RunHandle.attach(tmp_path / "nightly")
    with pytest.raises(InvalidJobError, match=message):
        Launcher(1, store=tmp_path, run_id="nightly").submit(print)
    assert own.run.numbers() == [0]
