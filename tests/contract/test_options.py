"""The table of options: each row is checked, described and offered everywhere, and a new option is one entry."""

import re
import subprocess
import sys

import pytest

from rankzero import InvalidJobError, Launcher
from rankzero.options import TABLE


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"engine"}))
def test_each_option_is_described_and_refuses_a_wrong_value_by_name(name: str) -> None:
    assert TABLE[name].help.endswith(".")
    assert f"        {name}: {TABLE[name].help}\n" in str(Launcher.__doc__)
    assert getattr(Launcher(), name) == TABLE[name].default
    with pytest.raises(InvalidJobError, match=name):
        Launcher(**{name: object()})


def test_each_option_that_a_text_can_hold_is_on_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "rankzero.cli", "run", "--help"], capture_output=True, text=True)
    offered = set(re.findall(r"--([a-z-]+)", done.stdout))
    assert {name.replace("_", "-") for name, option in TABLE.items() if option.kind.form} <= offered
    objects = {name for name, option in TABLE.items() if not option.kind.form}
    assert objects == {"engine", "checkpoints", "trackers"}
