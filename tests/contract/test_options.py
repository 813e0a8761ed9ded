"""The table of options: each row is checked, described and offered everywhere, and a new option is one entry."""

import re
import subprocess
import sys

import numpy as np
import pytest

from rankzero import CheckpointConfig, InvalidJobError, Launcher
from rankzero.options import TABLE


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"engine"}))
def test_each_option_is_described_and_refuses_a_wrong_value_by_name(name: str) -> None:
    assert TABLE[name].help.endswith(".")
    assert f"        {name}: {TABLE[name].help}\n" in str(Launcher.__doc__)
    assert getattr(Launcher(), name) == TABLE[name].default
    with pytest.raises(InvalidJobError, match=name):
        Launcher(**{name: object()})


def test_numbers_of_numpy_are_numbers() -> None:
    launcher = Launcher((np.int64(1), np.int32(2)), max_restarts=np.int64(1), timeout=np.float64(2.5))
    assert (launcher.num_processes, launcher.max_restarts, launcher.timeout) == ((1, 2), 1, 2.5)
    assert {type(value) for value in (*launcher.num_processes, launcher.max_restarts)} == {int}  # type: ignore[misc]
    assert type(launcher.timeout) is float
    assert type(CheckpointConfig(num_to_keep=np.int64(3)).num_to_keep) is int  # type: ignore[arg-type]
    for wrong in (np.int64(0), np.bool_(True), True):
        with pytest.raises(InvalidJobError, match="num_processes"):
            Launcher(wrong)  # type: ignore[arg-type]


def test_each_option_that_a_text_can_hold_is_on_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "rankzero.cli", "run", "--help"], capture_output=True, text=True)
    offered = set(re.findall(r"--([a-z-]+)", done.stdout))
    assert {name.replace("_", "-") for name, option in TABLE.items() if option.kind.form} <= offered
    objects = {name for name, option in TABLE.items() if not option.kind.form}
    assert objects == {"engine", "checkpoints", "trackers"}
