"""An object store that cannot be reached for a while: training goes on, and what was refused is written later."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.faults import kit
from tests.faults.trainings import HOLD_AT, STEPS, expected, train

from rankzero import Launcher, RunHandle
from rankzero.store import files

WAIT = 120.0

OUTAGE = 5.0
"""Seconds; longer than two heartbeats, shorter than the final status is tried for."""


class Outage:
    """Lets no request through while it is on; counts those it refused."""

    def __init__(self) -> None:
        self.on = False
        self.refused = 0
        self._through = files._filesystem

    def filesystem(self, location: str) -> tuple[Any, str]:
        if self.on:
            self.refused += 1
            raise ConnectionResetError("the store cannot be reached")
        return self._through(location)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    made = Outage()
    monkeypatch.setattr(files, "_filesystem", made.filesystem)
    yield made
    made.on = False


def newest(handle: RunHandle[Any]) -> int:
    return max((int(manifest.metrics["step"]) for manifest in handle.checkpoints()), default=-1)


@pytest.mark.parametrize("moment", ["training", "checkpoint", "returned", "committed"])
def test_a_run_outlives_an_outage_of_its_store(launcher: Launcher, tmp_path: Path, outage: Outage, moment: str) -> None:
    launcher = launcher.options(num_processes=1, store=f"memory://{tmp_path.name}", run_id="run")
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(lambda: launcher.run(train, str(tmp_path), moment))
        until(lambda: kit.arrival(tmp_path, moment) or value.done(), WAIT, f"a rank at {moment!r}")
        handle = RunHandle.attach(f"memory://{tmp_path.name}/run")
        saved = STEPS - 1 if moment in ("returned", "committed") else HOLD_AT - 1
        until(lambda: newest(handle) == saved, WAIT, f"the checkpoint of step {saved}")
        outage.on = True
        until(lambda: outage.refused or value.done(), WAIT, "a request that is refused")
        (tmp_path / "go").touch()
        with pytest.raises(TimeoutError):
            # Nobody gives up meanwhile.
            value.result(OUTAGE)
        outage.on = False
        result = value.result(WAIT)
    assert (result["value"], result["history"]) == (expected(STEPS, 1), [[0, 0]])
    assert handle.status().state == "succeeded"
    # What was reported during the outage may be lost; what was committed before is not.
    assert newest(handle) >= saved
