"""docs/errors.md has a section for every public error and an entry for every code; a wrong call has its own code."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.docs.pages import anchors

import rankzero
from rankzero import InvalidJobError, Launcher, RankZeroError, SparkEngine
from rankzero.compat.horovod.torch import HorovodInternalError, MismatchError, StallError

PAGE = "docs/errors.md"

OURS = [value for name in rankzero.__all__ if isinstance(value := getattr(rankzero, name), type)]
ERRORS = [cls for cls in OURS if issubclass(cls, RankZeroError) and cls is not RankZeroError]
ERRORS += [HorovodInternalError, MismatchError, StallError]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_has_a_section(cls: type) -> None:
    assert cls.__name__.lower() in anchors(PAGE)


def test_each_code_of_an_error_is_an_anchor_of_the_page() -> None:
    used = {code for path in (ROOT / "core").rglob("*.py") for code in re.findall(r'"(RZ-\d{4})"', path.read_text())}
    assert {code.lower() for code in used - {RankZeroError.code}} == {
        anchor for anchor in anchors(PAGE) if anchor.startswith("rz-")
    }


def train(lr: float = 0.1) -> float:
    """Returns its argument."""
    return lr


def open_to_all(launcher: Launcher) -> Any:
    """Runs in a directory that every user can write."""
    directory = Path("runs", "nightly")
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    return launcher.options(run_id="nightly", store="runs").run(train)


DYNAMIC = SparkEngine("yarn", conf={"spark.dynamicAllocation.enabled": "true"})


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("RZ-1001", lambda launcher: launcher.options(num_processes=0)),
        ("RZ-1002", lambda launcher: launcher.options(backend="nccl")),
        ("RZ-1003", lambda launcher: launcher.run(train, learning_rate=0.1)),
        ("RZ-1004", lambda launcher: launcher.run(train, threading.Lock())),
        ("RZ-1005", lambda launcher: launcher.run("trian.py")),
        ("RZ-1006", lambda launcher: launcher.run("acme.trian:main")),
        ("RZ-1007", lambda launcher: launcher.options(store="hdfs://namenode/runs").run(train)),
        ("RZ-1008", lambda launcher: launcher.options(store="a_file/runs").run(train)),
        ("RZ-1010", open_to_all),
        ("RZ-1011", lambda launcher: launcher.options(engine=DYNAMIC).run(train)),
        ("RZ-1012", lambda launcher: launcher.options(dataset="data/scans.parquet").run(train)),
    ],
)
def test_a_wrong_call_has_its_own_code(
    code: str, call: Callable[[Launcher], Any], launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    with pytest.raises(InvalidJobError) as raised:
        call(launcher)
    assert raised.value.code == code
