"""What all front doors have in common, since they stand on one way to follow a run."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher
from rankzero.compat.horovod import HorovodRunner
from rankzero.compat.ray_train import TorchTrainer


def train() -> str:
    import os

    import rankzero.train as rt

    # Nobody can write a file of this name now, and so not that the result arrived.
    place = rt.get_context().storage_path
    assert place is not None
    os.mkdir(os.path.join(place, "submissions", "0", "delivery"))
    return "trained"


FRONT_DOORS: dict[str, Any] = {
    "Launcher": lambda launcher: launcher.run(train),
    "HorovodRunner": lambda launcher: HorovodRunner(np=-1, launcher=launcher).run(train),
    "TorchTrainer": lambda launcher: TorchTrainer(train, launcher=launcher).fit().return_value,
}


@pytest.mark.parametrize("door", FRONT_DOORS)
def test_a_value_that_is_here_is_returned_though_the_store_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    with caplog.at_level(logging.WARNING, "rankzero"):
        assert FRONT_DOORS[door](Launcher(store=tmp_path)) == "trained"
    assert "could not be acknowledged" in caplog.text
