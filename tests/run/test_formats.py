"""Run directories of other versions: an earlier format is read, and a later one is refused by its number.

``formats/N`` holds a directory that the first version with format N wrote.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, Launcher, RunHandle, RunNotFoundError
from rankzero.job import FORMAT
from rankzero.run.listing import list_runs

FORMATS = Path(__file__).parent / "formats"


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copytree(FORMATS / str(getattr(request, "param", FORMAT)), tmp_path / "nightly")
    return tmp_path / "nightly"


@pytest.mark.parametrize("directory", range(1, FORMAT + 1), indirect=True)
def test_every_earlier_format_is_read(directory: Path) -> None:
    handle: RunHandle[dict[str, Any]] = RunHandle.attach(directory)
    assert handle.status().state == "succeeded"
    assert handle.result()["weight"].tolist() == [1.0, 1.0]
    assert [manifest.id for manifest in handle.checkpoints()] == ["0000-000002"]
    assert [row["loss"] for row in handle.metrics() if row["rank"] == 0] == [1.0, 0.75, 0.5]
    assert "[0] trained" in list(handle.logs())
    assert handle.params == {"lr": 0.5}
    assert handle.delivery().acknowledged
    assert [Path(found.directory).name for found in list_runs(str(directory.parent))] == ["nightly"]


def test_a_later_format_is_refused_by_its_number(directory: Path) -> None:
    facts = json.loads((directory / "job.json").read_text())
    (directory / "job.json").write_text(json.dumps({**facts, "format": FORMAT + 1}))
    message = rf"has format {FORMAT + 1}, and this version of rankzero reads formats up to {FORMAT}"
    with pytest.raises(RunNotFoundError, match=message):
        RunHandle.attach(directory)
    launcher = Launcher(1, store=directory.parent, run_id=directory.name)
    with pytest.raises(InvalidJobError, match=message):
        launcher.submit(print)
    assert not (directory / "submissions" / "1").exists()
