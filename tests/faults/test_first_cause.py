"""The failure that came first is named and decides about a restart, whatever its consequences raise, and when."""

import os
import signal
import time
from typing import Any

import pytest
from tests.conftest import find

import rankzero.train as rt
from rankzero import Launcher, RunHandle, WorkerFailedError


def break_connections() -> None:
    """Closes the connections of this rank to its peers, as its death does."""
    import socket

    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as link:
                if link.family == socket.AF_INET:
                    link.getpeername()
                    link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def wrap(how: str, error: Exception) -> None:
    if how == "from":
        raise ValueError("step failed") from error
    if how == "from None":
        raise ValueError("step failed") from None
    if how == "group":
        raise ExceptionGroup("steps failed", [error])
    raise ValueError("step failed")


def train_with_a_victim(how: str) -> int:
    """Rank 2 is killed after its peers have failed because of it, and have wrapped the error of their collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    attempt = rt.get_context().attempt
    if attempt == 0 and dist.get_rank() == 2:
        break_connections()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        wrap(how, error)
    return attempt


@pytest.mark.parametrize("how", ["from", "from None", "group", "while handling"])
def test_a_killed_rank_is_the_cause_of_what_its_peers_raise_from_their_collectives(
    launcher: Launcher, how: str
) -> None:
    launcher = launcher.options(num_processes=3, max_restarts=1, run_id="victim")
    assert launcher.run(train_with_a_victim, how) == 1
    handle = find(launcher)
    assert handle
    [restart] = [event for event in handle.events() if event["type"] == "restart"]
    assert restart["cause"] == "killed"
    assert "rank 2" in restart["what"]


def unwind(seconds: float) -> None:
    """Rank 1 raises, and needs a while for it, during which its peer fails."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        try:
            raise KeyError("the real cause")
        finally:
            break_connections()
            time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_needs_a_while_to_fail_is_named_and_its_exception_is_not_restarted(launcher: Launcher) -> None:
    launcher = launcher.options(max_restarts=2, run_id="late")
    with pytest.raises(WorkerFailedError, match="rank 1 on .*KeyError: 'the real cause'") as caught:
        launcher.run(unwind, 1.3)
    assert caught.value.cause is None
    handle = find(launcher)
    assert handle
    assert handle.status().attempt == 0


@pytest.mark.parametrize("hang_timeout", [None, 600.0])
def test_a_rank_that_has_not_failed_is_named_with_its_stack_where_only_consequences_are_known(
    launcher: Launcher, hang_timeout: float | None
) -> None:
    with pytest.raises(WorkerFailedError, match="rank 0 on ") as caught:
        launcher.options(hang_timeout=hang_timeout).run(unwind, 600.0)
    text = str(caught.value)
    assert caught.value.cause == "lost"
    assert "Only consequences are known" in text
    assert "rank 1 had not failed" in text
    assert "in unwind" in text.partition("rank 1 stood at:")[2]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def report_steps(asks: bool) -> None:
    context = rt.get_context()
    if asks:
        rt.get_checkpoint()
    for step in range(2):
        rt.report({"step": step}, checkpoint={"step": step})
    rt.context.await_checkpoint()
    rt.barrier()
    if context.attempt == 0 and context.rank == 0:
        die()
    rt.barrier()


@pytest.mark.parametrize("asks", [True, False])
def test_a_checkpoint_that_no_rank_asks_for_is_named_once_and_so_is_the_one_of_a_restart(
    launcher: Launcher, caplog: pytest.LogCaptureFixture, asks: bool
) -> None:
    launcher = launcher.options(max_restarts=1, run_id="ignored")
    launcher.run(report_steps, asks)
    assert "attempt 1 begins at checkpoint 0000-000001" in caplog.text
    handle = find(launcher)
    assert handle
    said = [line for line in lines(handle) if "get_checkpoint() was not called" in line]
    assert len(said) == (0 if asks else 1)
    assert asks or "checkpoint 0000-000001" in said[0]


def lines(handle: RunHandle[Any]) -> list[str]:
    return list(handle.logs())
