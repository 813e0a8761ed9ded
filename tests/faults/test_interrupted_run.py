"""An interrupt of ``run`` is that exception wherever it arrives; it ends the run, whose id the next one can use."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import interrupted
from tests.faults.test_own_driver import Apart

from rankzero import Launcher, LocalEngine, RunHandle, RunNotFoundError


@pytest.mark.parametrize(
    ("file", "step", "is_apart"),
    [
        ("rankzero/submit/durable.py", 1, False),
        ("rankzero/submit/start.py", 3, False),
        pytest.param("rankzero/submit/durable.py", 3, True, marks=pytest.mark.soak),
        pytest.param("", 20, False, marks=pytest.mark.soak),
    ],
)
def test_a_run_may_be_interrupted_anywhere(
    launcher: Launcher, tmp_path: Path, file: str, step: int, is_apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = (f"run-{number}" for number in itertools.count())
    local = launcher.options(num_processes=1, stop_grace=0.5, engine=Apart() if is_apart else LocalEngine())
    one = local
    local.run(abs, -1)

    def running() -> Callable[[], object]:
        nonlocal one
        one = local.options(run_id=next(names))
        return lambda: one.run(abs, -3)

    last = None
    for last in interrupted.everywhere(running, file, step):
        directory = tmp_path / "store" / str(one.run_id)
        try:
            state = RunHandle.attach(directory, follows=False).status().state
        except RunNotFoundError:
            state = None
        assert state in {None, "cancelled", "succeeded"}, f"moment {last}"
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert one.run(abs, -3) == 3, f"moment {last}"
        # A submission that was left behind would be waited for.
        assert "waiting at most" not in caplog.text, f"moment {last}"
    assert last is not None
