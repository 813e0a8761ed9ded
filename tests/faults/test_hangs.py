"""A run in which nothing moves ends, and the error says where every rank stood."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import find, wait_until_gone

from rankzero import HangError, Launcher, WorkerFailedError

WAIT = 90.0
HANG_TIMEOUT = 4.0


def restore_all_handlers() -> None:
    """As Lightning's Trainer does after each fit, and returns when the rank has its own handlers again."""
    from rankzero.host.processes import caught_signals

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
    deadline = time.monotonic() + 20.0
    while signal.SIGSEGV not in (caught_signals(os.getpid()) or set()) and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_for_peers(how: str) -> Any:
    import threading

    import torch
    import torch.distributed as dist

    import rankzero.train as rt

    # As it is read by the first group. In the environment of a launcher it would need a zygote of its own.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100" if how == "recorded" else "0"
    # A slow start of the group is no hang.
    rt.report({"step": 0})
    dist.init_process_group("gloo")
    rt.report({"step": 1})
    context = rt.get_context()
    if context.attempt:
        return "went on"
    if context.rank == 1:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if how == "restored":
            restore_all_handlers()
        if how in ("recorded", "restored"):
            lose_time()
    dist.all_reduce(torch.ones(1))
    return None


def lose_time() -> None:
    while True:
        time.sleep(0.1)


def test_a_hang_says_where_each_rank_stood(launcher: Launcher, marker: str) -> None:
    """Without torch's flight recorder, which the next test switches on."""
    launcher = launcher.options(hang_timeout=HANG_TIMEOUT, run_id="hangs")
    with pytest.raises(HangError) as caught:
        launcher.run(wait_for_peers, "restored")
    error = caught.value
    assert error.stacks is not None
    assert "all_reduce" in error.stacks["0"]
    assert "in lose_time" in error.stacks["1"]
    assert "agent/worker.py" not in str(error)
    assert error.missing == [1]
    assert "rank 1 had not joined the collective in which rank 0 waited" in str(error)
    assert wait_until_gone(marker) == []
    handle = find(launcher)
    assert handle is not None
    # The stacks of all threads are in the log of a rank whose interpreter still runs Python.
    assert any(line.startswith("Thread 0x") for line in handle.logs(rank=1))


def test_a_hang_can_be_tried_again_and_leaves_what_torchs_flight_recorder_knows(launcher: Launcher) -> None:
    """With gloo, whose recorder is NCCL's."""
    launcher = launcher.options(hang_timeout=HANG_TIMEOUT, max_restarts=1)
    handle = launcher.submit(wait_for_peers, "recorded")
    assert handle.result(WAIT) == "went on"
    assert [event["cause"] for event in handle.events() if event["type"] == "restart"] == ["hang"]
    # The stacks of all threads are in the rank's log.
    assert any(line.startswith("Thread 0x") for line in handle.logs(rank=1))
    lines = [line for line in handle.logs(rank=0) if line.startswith("rankzero: flight recorder: ")]
    assert any("not completed: gloo:all_reduce #1" in line for line in lines), lines


def test_a_rank_that_stops_before_its_first_heartbeat_hangs_no_later_than_others(launcher: Launcher) -> None:
    launcher = launcher.options(num_processes=1, hang_timeout=HANG_TIMEOUT, timeout=HANG_TIMEOUT + 20)
    with pytest.raises(HangError):
        launcher.run(lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGSTOP)))


def test_steps_and_reports_are_progress(launcher: Launcher) -> None:
    def slow() -> str:
        import threading

        import torch

        import rankzero.train as rt

        # The first step imports it, which may take longer than this test's bound: not what is asked here.
        imported = threading.Event()

        def report_meanwhile() -> None:
            while not imported.wait(HANG_TIMEOUT / 8):
                rt.report({})

        threading.Thread(target=report_meanwhile).start()
        import torch._dynamo

        imported.set()
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        # Each kind alone lasts longer than the timeout.
        for _ in range(9):
            time.sleep(HANG_TIMEOUT / 8)
            parameter.grad = torch.ones(1)
            optimizer.step()
        for _ in range(9):
            time.sleep(HANG_TIMEOUT / 8)
            rt.report({})
        return "moving"

    assert launcher.options(num_processes=1, hang_timeout=HANG_TIMEOUT).run(slow) == "moving"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hang_of_nccl_leaves_its_flight_recorders_dump(launcher: Launcher) -> None:
    def hang() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        time.sleep(600)

    env = {**(launcher.env or {}), "TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
    launcher = launcher.options(num_processes=1, use_gpu=True, hang_timeout=HANG_TIMEOUT, run_id="nccl", env=env)
    with pytest.raises(HangError):
        launcher.run(hang)
    handle = find(launcher)
    assert handle is not None
    assert any(line.startswith("rankzero: flight recorder: process group") for line in handle.logs(rank=0))


def lose_memory() -> None:
    restore_all_handlers()
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_leaves_its_stack_after_a_library_has_restored_all_handlers(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        launcher.options(num_processes=1).run(lose_memory)
    assert caught.value.signal == "SIGSEGV"
    log = "\n".join(caught.value.log_tail or [])
    assert "Fatal Python error: Segmentation fault" in log
    assert "in lose_memory" in log


def leave_rank_zero(does: str, witness: str) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        while not os.path.exists(witness):
            time.sleep(0.01)
        return "left"
    restore_all_handlers()
    ones = torch.ones(1)
    Path(witness).touch()
    if does == "waits":
        dist.all_reduce(ones)
    # As an evaluation by rank 0 alone, or the upload of a model.
    time.sleep(12.0)
    return "evaluated"


@pytest.mark.parametrize("does", ["waits", "works alone"])
def test_a_rank_that_returns_early_is_named_and_whoever_waits_for_it_hangs(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Whatever ``hang_timeout`` is: None by default."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.03")
    launcher = launcher.options(run_id="left", timeout=WAIT)
    if does == "waits":
        with pytest.raises(HangError, match="rank 1 returned, and rank 0 waited for 9 s in a collective") as caught:
            launcher.run(leave_rank_zero, does, str(tmp_path / "witness"))
        assert "all_reduce" in (caught.value.stacks or {})["0"]
    else:
        assert launcher.run(leave_rank_zero, does, str(tmp_path / "witness")) == "evaluated"
    handle = find(launcher)
    assert handle is not None
    place = "waits in a collective, " if does == "waits" else "works, "
    (line,) = [line for line in handle.logs(rank=0) if "rank 1 returned, without other progress" in line]
    assert place in line
