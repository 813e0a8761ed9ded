"""The checkpoint that was reported just before a rank raised: only the death of a process loses what it writes."""

import os
import threading
import time
from typing import Any

from tests.conftest import find

import rankzero.compat.horovod.torch as hvd
import rankzero.train as rt
from rankzero import Launcher


class Slow:
    """Takes two seconds to be written by the thread that writes checkpoints."""

    def __reduce__(self) -> tuple[Any, ...]:
        if threading.current_thread().name == "rankzero-checkpoints":
            time.sleep(2.0)
        return Slow, ()


def raises_behind_a_report() -> int:
    """The rank raises while rank 0 still writes; the next attempt gives what it begins with."""
    if checkpoint := rt.get_checkpoint():
        return int(checkpoint.load()["step"])
    if rt.get_context().attempt:
        return 0
    rt.report({}, checkpoint={"step": 1, "slow": Slow()})
    rt.barrier()
    if rt.get_context().rank == 0:
        raise ValueError("behind the report")
    time.sleep(600)
    return -1


def test_a_rank_that_raises_costs_no_checkpoint(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=2, max_restarts=1, restart_on=(ValueError,), stop_grace=30.0)
    assert launcher.run(raises_behind_a_report) == 1


def is_killed_behind_its_second_report() -> int:
    """The rank is killed in the line behind a report; the next attempt gives what it begins with."""
    if checkpoint := rt.get_checkpoint():
        return int(checkpoint.load()["step"])
    for step in (1, 2):
        rt.report({}, checkpoint={"step": step})
    os.kill(os.getpid(), 9)
    return -1


def test_a_rank_that_is_killed_behind_a_report_loses_no_checkpoint_of_the_one_before(launcher: Launcher) -> None:
    assert launcher.options(num_processes=1, max_restarts=1).run(is_killed_behind_its_second_report) in (1, 2)


def dies_behind_a_commit() -> list[int]:
    """Rank 0 is killed in the line behind a commit, twice; gives the steps that attempts begin with."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, begun=[])

    @hvd.elastic.run
    def train(state: Any) -> list[int]:
        begun = [*state.begun, state.step]
        while state.step < 3:
            state.step += 1
            state.begun = begun
            state.commit()
            if state.step < 3 and hvd.rank() == 0:
                os.kill(os.getpid(), 9)
        return begun

    return list(train(state))


def test_a_commit_of_hvd_is_durable_when_it_returns(launcher: Launcher) -> None:
    assert launcher.options(num_processes=2, max_restarts=2).run(dies_behind_a_commit) == [0, 1, 2]


def test_a_status_holds_a_bounded_number_of_metrics_and_of_checks_beside_them(launcher: Launcher) -> None:
    """A name for each step would make every heartbeat larger; a check that is missing would count as failed."""

    def train() -> None:
        rt.report({f"norm/{number}": 0.5 for number in range(500)})
        rt.report({"check/finite": True} | {f"check/{number}": True for number in range(1500)})
        rt.report({f"norm/{number}": 0.5 for number in range(500, 1000)} | {"accuracy": 0.9})

    launcher = launcher.options(num_processes=1, run_id="checks")
    launcher.run(train)
    handle = find(launcher)
    assert handle
    metrics = handle.status().metrics
    assert metrics["check/finite"] is True
    assert "accuracy" not in metrics
    assert len(metrics) == 2000
    assert len(handle.metrics()[1]) == 1501 + 2


def test_a_metric_may_have_the_name_of_an_own_column(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=1, run_id="one")
    before = time.time()
    launcher.run(lambda: rt.report({"time": 12.5, "rank": 0.75, "loss": 1.0}))
    handle = find(launcher)
    assert handle
    (row,) = handle.metrics()
    assert before < row.pop("time") < time.time()
    assert row == {"metrics.time": 12.5, "metrics.rank": 0.75, "loss": 1.0, "rank": 0}
    assert handle.status().metrics == {"time": 12.5, "rank": 0.75, "loss": 1.0}
