"""The table of options: each row is checked, described and offered everywhere; a wrong value is refused by name."""

import json
import math
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from rankzero import InvalidJobError, Launcher
from rankzero.job import Job, new_run_id
from rankzero.options import TABLE


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"engine"}))
def test_each_option_is_described_and_refuses_a_wrong_value_by_name(name: str) -> None:
    assert TABLE[name].help.endswith(".")
    assert f"        {name}: {TABLE[name].help}\n" in str(Launcher.__doc__)
    assert getattr(Launcher(), name) == TABLE[name].default
    # What the driver needs is in the job; the launcher turns the others into files and secrets.
    apart = {"dataset", "env", "py_files", "restart_on", "store", "trackers", "working_dir"}
    assert (name in apart) != (name in {field.name for field in fields(Job)})
    with pytest.raises(InvalidJobError, match=name):
        Launcher(**{name: object()})


def test_each_option_that_a_text_can_hold_is_on_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "rankzero.cli", "run", "--help"], capture_output=True, text=True)
    offered = set(re.findall(r"--([a-z-]+)", done.stdout))
    assert {name.replace("_", "-") for name, option in TABLE.items() if option.kind.form} <= offered
    objects = {name for name, option in TABLE.items() if not option.kind.form}
    assert objects == {"engine", "checkpoints", "trackers"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nccl"}, "needs use_gpu=True"),
        ({"processes_per_task": 3}, "processes_per_task=3 does not divide num_processes=2"),
        ({"timeout": math.inf}, "timeout is inf"),
        ({"start_timeout": None}, "start_timeout is None"),
        ({"run_id": "a/b"}, "run_id is 'a/b'"),
        ({"run_id": ""}, "run_id is ''"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"ports": (4000,)}, r"ports is \(4000,\)"),
        ({"ports": (4000, 3000)}, r"ports is \(4000, 3000\)"),
        ({"ports": (0, 3000)}, r"ports is \(0, 3000\)"),
        ({"dataset": object()}, "dataset 'train' is .*give a Spark DataFrame"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        Launcher(2, **options)  # type: ignore[arg-type]


def test_a_job_of_a_later_version_is_still_that_run() -> None:
    job = Job("id", "train", 4, 2, False, "auto", None, 60.0, {"kind": "local"})
    later = {**json.loads(job.to_json()), "an_option_of_tomorrow": [1]}
    assert Job.from_json(json.dumps(later).encode()) == job


def test_run_ids_are_unique_and_name_the_function() -> None:
    ids = {new_run_id("train <lambda>/x") for _ in range(100)}
    assert len(ids) == 100
    assert all("train-lambda-x" in run_id for run_id in ids)
