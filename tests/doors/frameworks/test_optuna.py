"""Optuna's study drives trainings, as docs/python.md shows: `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import blocks

pytest.importorskip("optuna", reason="make test-frameworks")


def test_the_documentations_study_finds_a_good_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path))
    found, study = [block for block in blocks("docs/python.md") if "sweep_step" in block.text]
    names: dict[str, Any] = {"__name__": "sweeps"}
    for block in (found, study):
        exec(compile(block.text, block.page, "exec", dont_inherit=True), names)
    assert len(names["study"].trials) == 12
    assert abs(names["study"].best_params["lr"] - 0.3) < 0.3
