"""What a task is given: as the job asks, whatever the session's own settings say, and counted beforehand."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.services import spark_session

from rankzero import InsufficientSlotsError, InvalidJobError, Launcher, SparkEngine
from rankzero import Launcher as AnyLauncher
from rankzero.engines.spark.conf import task_resources
from rankzero.job import Job


def job(**options: Any) -> Job:
    return AnyLauncher(**{"num_processes": 2, **options})._request().template


@pytest.mark.parametrize(
    ("options", "settings", "found"),
    [
        ({}, {}, None),
        ({"cpus_per_process": 1}, {}, None),
        ({"cpus_per_process": 2}, {"spark.task.cpus": "2"}, None),
        ({"cpus_per_process": 2}, {}, (2, 0)),
        ({"cpus_per_process": 1}, {"spark.task.cpus": "4"}, (1, 0)),
        ({"cpus_per_process": 2, "processes_per_task": 2}, {"spark.executor.cores": "4"}, (4, 0)),
        ({"use_gpu": True}, {"spark.executor.resource.gpu.amount": "2"}, (1, 1)),
        (
            {"use_gpu": True},
            {"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "0.5"},
            (1, 1),
        ),
        (
            {"use_gpu": True, "processes_per_task": 2},
            {"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "1"},
            (1, 2),
        ),
        ({"use_gpu": True}, {"spark.task.resource.gpu.amount": "1"}, None),
        # What no executor has is refused in other words.
        ({"use_gpu": True, "processes_per_task": 2}, {"spark.executor.resource.gpu.amount": "1"}, None),
    ],
)
def test_what_a_task_needs_beyond_its_session(
    options: dict[str, Any], settings: dict[str, str], found: tuple[int, int] | None
) -> None:
    resources = task_resources(job(**options), "spark://host:7077", settings)
    assert [int(value) for value in resources.values()] == list(found or ())


def test_what_no_session_can_give_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="a local master has no resource profiles: set it to 2$"):
        task_resources(job(cpus_per_process=2), "local[4]", {})
    with pytest.raises(InvalidJobError, match=r"8 cores for each task, more than an executor has .*cores=4"):
        task_resources(job(cpus_per_process=8), "yarn", {"spark.executor.cores": "4"})
    with pytest.raises(InvalidJobError, match="cpus_per_process=2 asks for 2 cores .* has spark.task.cpus=1"):
        Launcher(2, cpus_per_process=2, engine=SparkEngine("local[4]", conf={"spark.task.cpus": "1"})).run(print)
    with pytest.raises(InvalidJobError, match="cpus_per_process is 0"):
        Launcher(2, cpus_per_process=0)
    with pytest.raises(InvalidJobError, match="does not know cpus_per_process"):
        Launcher("auto", cpus_per_process=2)
    with pytest.raises(InsufficientSlotsError, match="has 1"):
        Launcher(2, cpus_per_process=2, engine=SparkEngine("local[2]")).run(print)


@pytest.mark.soak
def test_cores_of_a_rank_on_this_machine(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launcher.options(cpus_per_process=3).run(lambda: os.environ["OMP_NUM_THREADS"]) == "3"


@pytest.fixture(scope="module")
def fair(gpu_script: Path) -> Iterator[Any]:
    """Two executors of two cores and two GPUs each; a task of the session takes one core and no GPU, jobs share."""
    conf = {
        "spark.scheduler.mode": "FAIR",
        "spark.executor.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(gpu_script),
        "spark.executor.resource.gpu.discoveryScript": str(gpu_script),
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    }
    with spark_session("local-cluster[2,2,1024]", **conf) as session:
        yield session


def what_ranks_have() -> list[list[str]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES", "")])
    return found


@pytest.mark.soak
def test_a_session_of_other_settings_gives_what_the_job_asks_for(launcher: Launcher, fair: Any) -> None:
    on_cluster = launcher.options(engine=SparkEngine(session=fair))
    # Two cores each: one task fills an executor.
    found = on_cluster.options(cpus_per_process=2).run(what_ranks_have)
    assert [threads for threads, _ in found] == ["2", "2"]
    with pytest.raises(InsufficientSlotsError, match="needs 3 task slots"):
        on_cluster.options(num_processes=3, cpus_per_process=2).run(what_ranks_have)


@pytest.mark.soak
def test_gpus_that_the_session_does_not_give_its_tasks(launcher: Launcher, fair: Any) -> None:
    on_gpus = launcher.options(engine=SparkEngine(session=fair), use_gpu=True, backend="gloo", num_processes=4)
    seen = [visible for _, visible in on_gpus.run(what_ranks_have)]
    assert sorted(seen) == ["3", "3", "GPU-5a1b", "GPU-5a1b"]
    two_each = on_gpus.options(processes_per_task=2).run(what_ranks_have)
    assert {visible for _, visible in two_each} == {"3,GPU-5a1b"}
