"""Bad configuration is refused when the launcher is made, with the value and the way out."""

import json
import math

import pytest

from rankzero import InvalidJobError, Launcher
from rankzero.job import Job, new_run_id


@pytest.mark.parametrize("value", [0, -1, 2.5, "2", True, None])
def test_num_processes_must_be_a_positive_integer(value: object) -> None:
    with pytest.raises(InvalidJobError, match="num_processes is .*positive integer"):
        Launcher(value)  # type: ignore[arg-type]


def test_processes_per_task_must_divide() -> None:
    with pytest.raises(InvalidJobError, match="processes_per_task=3 does not divide num_processes=4"):
        Launcher(4, processes_per_task=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nccl"}, "needs use_gpu=True"),
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


def test_options_makes_a_checked_copy() -> None:
    launcher = Launcher(2)
    assert launcher.options(num_processes=4).num_processes == 4
    assert launcher.num_processes == 2
    with pytest.raises(InvalidJobError, match="num_processes is 0"):
        launcher.options(num_processes=0)
    with pytest.raises(InvalidJobError, match="no option 'num_process' .did you mean 'num_processes'"):
        launcher.options(num_process=4)


def test_a_job_survives_json() -> None:
    job = Job("id", "train", 4, 2, False, "auto", None, 60.0, {"kind": "local"}, {"payload.pkl": {"size": 1}})
    assert Job.from_json(job.to_json()) == job
    assert job.num_tasks == 2


def test_a_job_of_a_later_version_is_still_that_run() -> None:
    job = Job("id", "train", 4, 2, False, "auto", None, 60.0, {"kind": "local"})
    later = {**json.loads(job.to_json()), "an_option_of_tomorrow": [1]}
    assert Job.from_json(json.dumps(later).encode()) == job


def test_run_ids_are_unique_and_name_the_function() -> None:
    ids = {new_run_id("train <lambda>/x") for _ in range(100)}
    assert len(ids) == 100
    assert all("train-lambda-x" in run_id for run_id in ids)
