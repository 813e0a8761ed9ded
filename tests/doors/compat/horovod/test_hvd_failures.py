"""Ranks that disagree, skip, fail, or die: every rank gets an error that names the operation and the ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port

import rankzero.compat.horovod.torch as hvd
from rankzero import HangError, Launcher, WorkerFailedError

LIMIT = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}
"""A wait that no test means fails, and does not last half an hour."""


def calls() -> None:
    """What differs between ranks, and what no rank may call, is named."""
    import torch

    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    hvd.init()
    rank = hvd.rank()
    one, many = torch.ones(1), torch.ones(1000)
    shapes = (
        "'allreduce.shape' is not the same on all ranks: rank 0: allreduce Average torch.float32 [2]; "
        "rank 1: allreduce Average torch.float32 [3]"
    )
    differs, typed = hvd.MismatchError, [many, many.long()]
    for error, message, call in [
        (differs, re.escape(shapes), lambda: hvd.allreduce(torch.ones(2 + rank), name="shape")),
        (differs, "torch.int64", lambda: hvd.allreduce(typed[rank], name="type")),
        (differs, "allreduce Min", lambda: hvd.allreduce(many, op=[hvd.Sum, hvd.Min][rank], name="op")),
        (differs, "prescale 2", lambda: hvd.allreduce(many, prescale_factor=1.0 + rank, name="scale")),
        (differs, ", allreduce", lambda: hvd.grouped_allreduce([many] * (1 + rank), name="group")),
        (differs, "of rank 1", lambda: hvd.broadcast(many, rank, name="root")),
        (differs, r"\[2\]", lambda: hvd.allgather(torch.ones(2, 1 + rank), name="tail")),
        (differs, r"process_set \[1\]", lambda: hvd.add_process_set([rank])),
        (NotImplementedError, "op is 'Adasum'", lambda: hvd.allreduce(one, op=hvd.Adasum)),
        (TypeError, "complex tensors", lambda: hvd.allreduce(many.to(torch.complex64))),
        (TypeError, "their parts", lambda: hvd.broadcast_(torch._neg_view(many), 0)),
        (TypeError, "Average of torch.bool", lambda: hvd.allreduce(many > 0)),
        (TypeError, "Sum of torch.int16", lambda: hvd.reducescatter(many.to(torch.int16), op=hvd.Sum)),
        (ValueError, "add up to 2 rows", lambda: hvd.alltoall(torch.ones(2), splits=[1, 2])),
        (ValueError, "not a scalar", lambda: hvd.allgather(torch.tensor(1.0))),
        (ValueError, "use hvd.Average or hvd.Sum", lambda: hvd.reducescatter(many, op=hvd.Max)),
        (ValueError, "do not exist", lambda: hvd.add_process_set([0, 7])),
    ]:
        # Others are not affected by one that fails.
        good = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="good")
        with pytest.raises(error, match=message):
            call()
        assert hvd.synchronize(good).tolist() == [2, 2]
    if rank == 0:
        # Its peer issues it only after the second call was refused.
        late = hvd.allreduce_async(one, name="late")
        with pytest.raises(ValueError, match=r"'allreduce.late' was issued again before it has ended"):
            hvd.allreduce_async(one, name="late")
    hvd.broadcast_object("refused")
    hvd.synchronize(late if rank == 0 else hvd.allreduce_async(one, name="late"))
    for call in (
        lambda: hvd.allgather(torch.ones(3), name="x"),
        lambda: hvd.allreduce(torch.ones(300), name="y", op=hvd.Min),
        lambda: hvd.add_process_set([1]),
    ):
        if rank == 1:
            with pytest.raises(differs, match="rank .0. has joined, which only sums and averages allow"):
                call()
    assert hvd.join() == 1


def test_what_differs_and_wrong_calls_are_named(tmp_path: Path) -> None:
    Launcher(2, store=tmp_path, env=LIMIT).run(calls)


def ends(how: str) -> None:
    """Rank 0 waits for something that rank 1 never does."""
    import time

    import torch

    hvd.init()
    pair = hvd.add_process_set([0, 1]) if how == "in a set" else hvd.global_process_set
    if hvd.rank() == 0:
        if how == "join":
            hvd.join()
        hvd.allreduce(torch.ones(2), name="gradient", process_set=pair)
    while hvd.rank() == 1 and how == "goes on":
        hvd.allreduce_async(torch.ones(2), name="others")
        time.sleep(600)


NEVER = "'allreduce.gradient' was issued by rank [0], but rank"


@pytest.mark.parametrize(
    ("how", "ranks", "message"),
    [
        ("returns", 2, f"{NEVER} [1] has ended without it"),
        ("in a set", 3, f"{NEVER} [1] has ended without it"),
        ("join", 2, "'join.all' was issued by rank [0], but rank [1] has ended without it"),
        ("goes on", 2, f"for 8 s {NEVER} [1] has not"),
    ],
)
def test_what_a_rank_waits_for_in_vain_is_named(tmp_path: Path, how: str, ranks: int, message: str) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"}
    handle = Launcher(ranks, store=tmp_path, env=env if how == "goes on" else LIMIT).submit(ends, how)
    with pytest.raises(WorkerFailedError, match=re.escape(message)) as failure:
        handle.result(60)
    assert (failure.value.exception_type or "").endswith("StallError")
    if how == "goes on":
        assert [line for line in handle.logs(0) if "rankzero: rank 0 has waited" in line and NEVER in line]


def test_a_rank_may_join_long_before_the_last_one(tmp_path: Path) -> None:
    def train() -> Any:
        import time

        import torch

        hvd.init()
        time.sleep(6 * hvd.rank())
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() if hvd.rank() else None
        return hvd.join(), hvd.allgather_object(total)

    launcher = Launcher(2, store=tmp_path, env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"})
    assert launcher.run(train) == (1, [None, [1, 1]])


def test_a_rank_that_hangs_is_seen_while_its_peer_waits_for_it_to_shut_down(tmp_path: Path) -> None:
    def train() -> None:
        import time

        hvd.init()
        time.sleep(600 * hvd.rank())

    with pytest.raises(HangError):
        Launcher(2, store=tmp_path, hang_timeout=4.0, timeout=60).run(train)


def again_and_again() -> Any:
    """After a failure the same processes shut down, initialize and continue, as a loop by hand does."""
    import threading

    import torch

    def reduce(name: str, **options: Any) -> Any:
        return hvd.allreduce(torch.ones(300), name=name, **options)

    files = []
    hvd.init()
    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch:
            if hvd.rank() == 1:
                patch.setattr(torch, "cat", None)
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 failed: TypeError") as first:
                hvd.grouped_allreduce([torch.ones(300)] * 2, name="fused")
            with pytest.raises(hvd.HorovodInternalError, match=re.escape(str(first.value))):
                reduce("next")
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert "rankzero-horovod" not in [thread.name for thread in threading.enumerate()]
        files.append(len(os.listdir("/proc/self/fd")))
        hvd.init()
        assert reduce("again", op=hvd.Sum)[0].item() == 2
    assert min(files[2:]) <= max(files[:2]), f"connections stay open: {files}"
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    hvd.init()
    return hvd.allgather_object(hvd.rank())


def test_ranks_continue_after_a_failure(tmp_path: Path) -> None:
    assert Launcher(2, store=tmp_path, env=LIMIT).run(again_and_again) == [0, 1]


PROGRAM = """
import os, sys, torch
import rankzero.compat.horovod.torch as hvd

how, *ports = sys.argv[1:]
for port in ports:
    ranks = []
    while len(ranks) < 2 and (forked := os.fork()):
        ranks.append(forked)
    if len(ranks) < 2:
        break
    print("ended", *(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in ranks), flush=True)
else:
    sys.exit()

rank = len(ranks)
os.environ.update(RANK=str(rank), MASTER_PORT=port)
hvd.init()
if how != "exits":
    if rank == 1 and how == "gradient":
        os.kill(os.getpid(), 9)
    if rank == 1:
        hvd.global_process_set.coordinator._connections.execute = lambda *_: os.kill(os.getpid(), 9)
    request = hvd.allreduce_async(torch.ones(1 << 26), name=how)
    try:
        request.wait()
    except hvd.HorovodInternalError as error:
        print(error, flush=True)
    sys.exit()
other = hvd.allreduce_async(torch.ones(2), name=f"only on {rank}")
for index in range(5):
    hvd.allreduce(torch.ones(300), name=f"{index}")
hvd.allreduce(torch.ones(2), name=f"only on {1 - rank}")
late = [hvd.allreduce_async(torch.ones(3000), name=f"late {index}") for index in range(40)]
if rank == 1:
    other.wait()
"""
"""Two ranks, again and again: forks of a process that has imported torch, which end with operations under way."""


@pytest.mark.parametrize(
    ("how", "count", "codes"),
    [
        ("exits", 3, "0 0"),
        pytest.param("exits", 100, "0 0", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
        # Before it issues anything, and while a collective is under way.
        ("gradient", 1, "0 -9"),
        ("large", 1, "0 -9"),
    ],
)
def test_a_program_exits_without_an_abort_and_a_killed_peer_is_named_by_its_rank(
    how: str, count: int, codes: str
) -> None:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, how, *(str(free_port()) for _ in range(count))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120.0 * count)
    assert re.findall("^ended (.*)$", done.stdout, re.MULTILINE) == [codes] * count, done.stdout + done.stderr
    assert how == "exits" or f"rank [1] has died, while rank 0 waited for 'allreduce.{how}'" in done.stdout
