"""`num_processes="auto"`: as many ranks as the engine is known to have places for."""

from __future__ import annotations

import os

import pytest

from rankzero import InsufficientSlotsError, InvalidJobError, Launcher, LocalEngine, SparkEngine, WorkerFailedError
from rankzero.engines import local
from rankzero.engines.spark import conf

YARN = {"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local, conf):
        monkeypatch.setattr(module, "available_cores", lambda: 3)


def test_a_run_has_a_rank_for_each_place(launcher: Launcher) -> None:
    def world() -> str:
        return os.environ["WORLD_SIZE"]

    assert launcher.options(num_processes="auto").run(world) == "3"
    assert launcher.options(num_processes="auto", processes_per_task=2).run(world) == "2"


def test_a_retry_on_a_machine_of_another_size_goes_on_from_the_checkpoint(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> tuple[str, int] | None:
        import rankzero.train as rt

        if (checkpoint := rt.get_checkpoint()) is None:
            rt.report({}, checkpoint={"step": 7})
            # A peer that failed first would end rank 0 before its checkpoint is in.
            if rt.get_context().rank == 0:
                raise ValueError("not yet")
            return None
        return os.environ["WORLD_SIZE"], checkpoint.load()["step"]

    launcher = launcher.options(num_processes="auto", run_id="moved")
    with pytest.raises(WorkerFailedError, match="not yet"):
        launcher.run(train)
    monkeypatch.setattr(local, "available_cores", lambda: 2)
    assert launcher.run(train) == ("2", 7)


@pytest.mark.parametrize(
    ("engine", "per_task", "size"),
    [
        (LocalEngine(), 1, 3),
        (LocalEngine(), 2, 2),
        (LocalEngine(), 8, 8),
        (SparkEngine(), 2, 2),
        (SparkEngine(master="local[4]"), 2, 8),
        # What this process may use of the machine, as the JVM counts.
        (SparkEngine(master="local[*]"), 1, 3),
        (SparkEngine(master="local-cluster[2,3,512]"), 1, 6),
        (SparkEngine(master="yarn", conf=YARN), 1, 6),
    ],
)
def test_what_an_engine_has_places_for(engine: LocalEngine | SparkEngine, per_task: int, size: int) -> None:
    assert engine.num_processes(per_task, use_gpu=False) == size


def test_gpus_are_counted_where_ranks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for engine in (LocalEngine(), SparkEngine(), SparkEngine(master="local[8]")):
        assert engine.num_processes(1, use_gpu=True) == 3
        assert engine.num_processes(2, use_gpu=True) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InsufficientSlotsError, match="offers 0"):
        LocalEngine().num_processes(1, use_gpu=True)


@pytest.mark.parametrize("engine", [SparkEngine(master="spark://host:7077"), SparkEngine(master="yarn")])
def test_a_cluster_of_which_nothing_is_known_wants_numbers(launcher: Launcher, engine: SparkEngine) -> None:
    with pytest.raises(InvalidJobError, match=r"give a number, or the smallest and the largest, such as \(2, 8\)"):
        launcher.options(num_processes="auto", engine=engine).run(print)
