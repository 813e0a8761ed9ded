"""Whoever waits goes on as soon as it can, and hears of what can never come; nothing is left of a set that ended."""

from pathlib import Path

import pytest

from rankzero import Launcher, WorkerFailedError
from rankzero.testing import run_inline

BOUND = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
"""A wait that is none of those that are meant fails, and does not last half an hour."""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path, env=BOUND)


def test_a_result_that_is_here_is_given_though_another_operation_waits_for_a_rank(launcher: Launcher) -> None:
    def train() -> bool:
        import torch
        import torch.distributed as dist

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        for _ in range(30):
            # Rank 1 issues it when rank 0 has come to the barrier.
            early = hvd.allreduce_async(torch.ones(300), name="late") if hvd.rank() == 0 else None
            hvd.allreduce(torch.ones(300), name="loss")
            dist.barrier()
            hvd.synchronize(early or hvd.allreduce_async(torch.ones(300), name="late"))
        return True

    assert launcher.run(train)


def test_a_rank_in_join_hears_that_another_one_has_ended(launcher: Launcher) -> None:
    def train() -> None:
        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.join()

    with pytest.raises(WorkerFailedError, match=r"rank \[0\] waits in join\(\), but rank \[1\] has ended"):
        launcher.run(train)


def test_what_one_rank_never_issues_is_named_though_the_ranks_go_on(tmp_path: Path) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(2), name="forgotten")
        while True:
            hvd.allreduce(torch.ones(2), name="others")

    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    handle = Launcher(2, store=tmp_path, env=env).submit(train)
    named = r"'allreduce.forgotten' was issued by rank \[0\], but rank \[1\] has not"
    with pytest.raises(WorkerFailedError, match=f"for 2 s {named}"):
        handle.result(60)
    text = named.replace("\\", "")
    assert any(f"for 1 s {text}" in line for line in [*handle.logs(0), *handle.logs(1)])


def test_what_a_rank_leaves_out_in_a_set_is_heard_there_when_it_ends(tmp_path: Path) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        pair = hvd.add_process_set([0, 1])
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(2), name="in the set", process_set=pair)

    with pytest.raises(WorkerFailedError, match=r"in the set' was issued by rank \[1\], but rank \[0\] has ended"):
        Launcher(3, store=tmp_path, env=BOUND).run(train)


def fails_alone() -> str:
    import torch

    import rankzero.compat.horovod.torch as hvd
    from rankzero.compat.horovod.torch.world import global_process_set

    hvd.init()
    if hvd.rank() == 0:
        global_process_set.coordinator._fail(MemoryError("no memory is left"))
    try:
        hvd.allreduce(torch.ones(300), name="gradient")
    except hvd.HorovodInternalError as error:
        return str(error)
    return ""


def test_what_fails_on_one_rank_alone_is_an_error_on_the_others() -> None:
    values = run_inline(fails_alone, world_size=2, env=BOUND).values
    assert values == ["no memory is left", "rank 0 failed: no memory is left"]


def test_a_barrier_does_not_need_a_rank_that_has_joined(launcher: Launcher) -> None:
    def train() -> int:
        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            hvd.barrier()
        return hvd.join()

    assert launcher.run(train) == 1


def test_sets_that_differ_between_ranks_are_named(launcher: Launcher) -> None:
    def train() -> None:
        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        hvd.add_process_set([hvd.rank()])

    with pytest.raises(WorkerFailedError, match=r"rank 0: barrier \[0\]; rank 1: barrier \[1\]"):
        launcher.run(train)


def test_an_end_leaves_no_connections_behind(launcher: Launcher) -> None:
    def train() -> list[int]:
        import gc
        import os

        import torch

        import rankzero.compat.horovod.torch as hvd

        found = []
        for _ in range(12):
            hvd.init()
            both = hvd.add_process_set([0, 1])
            if hvd.rank() < 2:
                late = hvd.allreduce_async(torch.ones(300), name="x", process_set=both)
            hvd.remove_process_set(both)
            if hvd.rank() < 2:
                assert hvd.synchronize(late)[0].item() == 1, "what is here is given after the set's end"
            hvd.shutdown()
            gc.collect()
            found.append(len(os.listdir("/proc/self/fd")))
        return found

    found = launcher.options(num_processes=3).run(train)
    # A set has 20 and more; threads of an end go a moment later.
    assert min(found[6:]) < max(found[:6]) + 20, found


@pytest.mark.parametrize("seconds", ["abc", "-1", "inf"])
def test_seconds_that_are_none_are_refused_by_name(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankzero.compat.horovod.torch import world

    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"HOROVOD_STALL_CHECK_TIME_SECONDS is '{seconds}'; give seconds"):
        world._seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60)
