"""The soak finds what its rounds leave, and nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.faults.soak import Plan, Round


@pytest.mark.soak
def test_a_round_without_a_fault_is_right() -> None:
    # Short: torch's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        done = Round(Plan(seed=0, number=0, how="submit", steps=2, pace=0.0, restarts=0), Path(directory))
        done.go()
        assert done.problems == []


def test_what_a_round_leaves_is_a_problem() -> None:
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        done = Round(Plan(seed=0, number=0, how="submit", steps=2, pace=0.0, restarts=0), Path(directory))
        (done.temp / "rankzero-agent-left").mkdir()
        done._check_temp()
        assert done.problems == ["temporary directories are left: ['rankzero-agent-left']"]
