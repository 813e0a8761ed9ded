"""The table of options: each row is checked, described and offered everywhere, and a new option is one entry."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import ROOT

from rankzero import InvalidJobError, Launcher
from rankzero.options import TABLE

PACKAGES = ("core/rankzero", "airflow_provider/airflow_rankzero", "dagster_integration/dagster_rankzero")


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
    for wrong in (np.int64(0), np.bool_(True), True):
        with pytest.raises(InvalidJobError, match="num_processes"):
            Launcher(wrong)  # type: ignore[arg-type]


def test_each_option_that_a_text_can_hold_is_on_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "rankzero.cli", "run", "--help"], capture_output=True, text=True)
    offered = set(re.findall(r"--([a-z-]+)", done.stdout))
    assert {name.replace("_", "-") for name, option in TABLE.items() if option.kind.form} <= offered
    objects = {name for name, option in TABLE.items() if not option.kind.form}
    assert objects == {"engine", "checkpoints", "trackers"}


ENTRY = {
    "        trackers: External": "        cool_down: Seconds that a run waits before it starts; None for none.\n",
    "    trackers: Sequence": "    cool_down: float | None = option(None, kinds.SECONDS, late=True)\n",
}
"""The two lines of an option in the class `Options`, by what they are put before."""

USES = """
import click.testing, inspect
from rankzero import Launcher, InvalidJobError
from rankzero.cli import main
assert Launcher(cool_down=3.0).options(timeout=9).cool_down == 3.0
for wrong in (0, "soon"):
    try:
        Launcher(cool_down=wrong)
    except InvalidJobError as error:
        assert str(error) == f"cool_down is {wrong!r}; it must be a positive number of seconds"
    else:
        raise AssertionError(wrong)

help = click.testing.CliRunner().invoke(main, ["run", "--help"]).output
assert "--cool-down TIME" in help and "Seconds that a run waits before it starts." in help, help
refused = click.testing.CliRunner().invoke(main, ["run", "--cool-down", "soon", "train.py"])
assert "such as 90s or 1h30m" in refused.output, refused.output

from airflow_rankzero import TorchDistributorOperator
task = TorchDistributorOperator(task_id="train", train=print, cool_down="{{ params.pause }}")
assert task.cool_down == "{{ params.pause }}" and "cool_down" in task.template_fields
assert inspect.signature(TorchDistributorOperator).parameters["cool_down"].annotation == "float | str | None"
try:
    TorchDistributorOperator(task_id="wrong", train=print, cool_down=-1)
except InvalidJobError as error:
    assert "cool_down is -1" in str(error)
else:
    raise AssertionError("-1")

from dagster_rankzero import TorchDistributorResource
assert TorchDistributorResource(cool_down=2.0)._launcher().cool_down == 2.0
assert TorchDistributorResource().options(cool_down=4.0).cool_down == 4.0
"""


@pytest.mark.soak
def test_a_new_option_is_one_entry(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "reference.py", tmp_path / "scripts")
    table = tmp_path / "core/rankzero/options.py"
    text = table.read_text()
    for place, line in ENTRY.items():
        assert text.count(place) == 1
        text = text.replace(place, line + place)
    table.write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    environment["AIRFLOW_HOME"] = str(tmp_path / "airflow")
    environment["PYTHONPATH"] = os.pathsep.join(str((tmp_path / name).parent) for name in PACKAGES)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("scripts/reference.py")
    run("-c", USES)
    page = "\n".join(json.loads(run("scripts/reference.py", "--pages")).values())
    entry = "* `cool_down`: Seconds that a run waits before it starts; {} for none."
    assert page.count(entry.format("None")) == 2, "for the launcher and the operator"
    assert entry.format("null") in page
    shown = re.findall(r"^    cool_down: (.*),$", page, re.MULTILINE)
    # `distributed`, `Launcher`, the operator, the resource.
    assert shown == ["float | None = None"] * 2 + ["float | str | None = None", "float | None = None"]
