"""Whoever waits goes on as soon as it can, and hears of what can never come; nothing is left of a set that ended."""

import re
from pathlib import Path

import pytest

from rankzero import Launcher, WorkerFailedError

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
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(2), name="forgotten")
        while True:
            hvd.allreduce(torch.ones(2), name="others")
            time.sleep(0.02)

    # Of which one is the bound of a round, too: a pause of the machine is shorter.
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"}
    handle = Launcher(2, store=tmp_path, env=env).submit(train)
    named = "'allreduce.forgotten' was issued by rank [0], but rank [1] has not"
    with pytest.raises(WorkerFailedError, match=re.escape(f"for 8 s {named}")):
        handle.result(60)
    lines = [*handle.logs(0), *handle.logs(1)]
    assert any(re.search(rf"for \d s {re.escape(named)}", line) for line in lines), lines


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


def fails_alone() -> None:
    import torch

    import rankzero.compat.horovod.torch as hvd
    from rankzero.compat.horovod.torch.world import global_process_set

    hvd.init()
    if hvd.rank() == 0:
        # As when it has no memory for what it has got.
        global_process_set.coordinator._fail(MemoryError("no memory is left"))
    try:
        hvd.allreduce(torch.ones(300), name="gradient")
    except hvd.HorovodInternalError as error:
        print(f"heard: {error}")


def test_what_fails_on_one_rank_alone_is_an_error_in_the_next_round_of_the_others(launcher: Launcher) -> None:
    handle = launcher.submit(fails_alone)
    handle.result(timeout=120)
    assert "heard: no memory is left" in handle.logs(0)
    assert "heard: rank 0 failed: no memory is left" in handle.logs(1)


def test_an_operation_whose_peer_has_died_is_done_to_those_who_poll(tmp_path: Path) -> None:
    heard, issued = tmp_path / "heard", tmp_path / "issued"

    def train() -> None:
        import os
        import signal
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        # Its peer dies, and then rank 0 is asked to stop.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hvd.init()
        late = hvd.allreduce_async_(torch.ones(10_000_000), name="gradient")
        if hvd.rank() == 1:
            while not issued.exists():
                time.sleep(0.01)
            # Both have begun by then, or not: each is an end of it.
            time.sleep(0.3)
            os._exit(9)
        issued.touch()
        deadline = time.monotonic() + 30
        while not hvd.poll(late) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert hvd.poll(late)
        try:
            hvd.synchronize(late)
            heard.write_text("done")
        except hvd.HorovodInternalError as error:
            heard.write_text(str(error))

    with pytest.raises(WorkerFailedError, match="exited with code 9"):
        Launcher(2, store=tmp_path / "store", env=BOUND, stop_grace=60).run(train)
    assert heard.read_text() == "done" or "'allreduce.gradient'" in heard.read_text()


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


def test_sets_of_one_rank_leave_no_threads_behind(launcher: Launcher) -> None:
    def train() -> list[str]:
        import threading
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        for _ in range(5):
            alone = hvd.add_process_set([0])
            if hvd.rank() == 0:
                hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="x", process_set=alone))
            hvd.remove_process_set(alone)
        deadline = time.monotonic() + 20
        while "rankzero-horovod" in (names := [thread.name for thread in threading.enumerate()]):
            if time.monotonic() > deadline:
                return names
            time.sleep(0.05)
        return []

    assert launcher.run(train) == []


def test_a_set_that_is_refused_leaves_an_init_that_ends(launcher: Launcher) -> None:
    def train() -> bool:
        import rankzero.compat.horovod.torch as hvd

        with pytest.raises(ValueError, match="do not exist"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 7])])
        if hvd.rank() == 1:
            return True
        with pytest.raises(hvd.StallError, match="has ended without it"):
            hvd.barrier()
        return True

    assert launcher.run(train)


@pytest.mark.parametrize("seconds", ["abc", "-1", "inf"])
def test_seconds_that_are_none_are_refused_by_name(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankzero.compat.horovod.torch import world

    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"HOROVOD_STALL_CHECK_TIME_SECONDS is '{seconds}'; give seconds"):
        world._seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60)
