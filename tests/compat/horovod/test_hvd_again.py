"""After a failure the same processes shut down, initialize and go on, as a loop by hand does."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher, WorkerFailedError

BOUND = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
"""A wait that is none of those that are meant fails, and does not last half an hour."""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path, env=BOUND)


def test_ranks_go_on_after_each_kind_of_failure(launcher: Launcher) -> None:
    def train() -> list[str]:
        import torch

        import rankzero.compat.horovod.torch as hvd
        from rankzero.compat.horovod.torch import agreement, execute

        agreement.DEADLOCK_ROUNDS = 50

        def raises() -> None:
            if hvd.rank() == 1:
                raise ValueError("no data")
            hvd.allreduce(torch.ones(300), name="lost")

        def raises_with_operations_under_way() -> None:
            both = [hvd.allreduce_async(torch.ones(300), name=f"{index}") for index in range(3)]
            if hvd.rank() == 0:
                hvd.allreduce_async(torch.ones(300), name="own")
                raise ValueError("no data")
            hvd.synchronize(both)
            hvd.barrier()

        def skips() -> None:
            hvd.allreduce(torch.ones(300), name="left" if hvd.rank() == 0 else "right")

        def fails_in_all() -> None:
            reduce = execute.allreduce

            def out_of_memory(*_: Any) -> None:
                raise RuntimeError("out of memory")

            execute.allreduce = out_of_memory
            try:
                hvd.allreduce(torch.ones(300), name="large")
            finally:
                execute.allreduce = reduce

        def fails_in_a_set_of_its_own() -> None:
            both = hvd.add_process_set([0, 1])
            if both.included():
                hvd.allreduce(torch.ones(300), name=["left", "right"][hvd.rank()], process_set=both)

        found = []
        hvd.init()
        for fails in (raises, raises_with_operations_under_way, skips, fails_in_all, fails_in_a_set_of_its_own):
            try:
                fails()
            except (ValueError, hvd.HorovodInternalError) as error:
                found.append(type(error).__name__)
            hvd.shutdown()
            assert not hvd.is_initialized()
            hvd.init()
            assert hvd.allreduce(torch.full((300,), 1.0 + hvd.rank()), op=hvd.Sum)[0].item() == 6, fails.__name__
            assert hvd.broadcast_object(hvd.rank(), 1) == 1
        return hvd.allgather_object(found)

    zero, one, two = launcher.options(num_processes=3).run(train)
    assert zero == ["StallError", "ValueError", "StallError", "HorovodInternalError", "StallError"]
    assert one == ["ValueError", "StallError", "StallError", "HorovodInternalError", "StallError"]
    assert two == ["StallError", "StallError", "StallError", "HorovodInternalError"]


def test_a_loop_by_hand_goes_on_with_its_optimizer_from_its_last_commit(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 1.0)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, batch=0)
        failures = 0

        def loop() -> None:
            while state.batch < 4:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                if state.batch == 2 and failures == 0 and hvd.rank() == 1:
                    raise hvd.HorovodInternalError("a link is down")
                optimizer.step()
                state.batch += 1
                state.save()

        while True:
            try:
                state.sync()
                loop()
                break
            except hvd.HorovodInternalError:
                failures += 1
                state.restore()
            hvd.shutdown()
            hvd.init()
            state.on_reset()
        return hvd.allgather_object((state.batch, failures, round(model.weight.item(), 4)))

    # Four steps of 0.1: the gradient is 1.
    assert launcher.run(train) == [(4, 1, 0.6)] * 2


def test_an_operation_that_fails_in_one_rank_alone_ends_the_attempt(launcher: Launcher) -> None:
    def train() -> None:
        import sys

        import torch

        import rankzero.compat.horovod.torch as hvd

        execute: Any = sys.modules[f"{hvd.__name__}.execute"]

        def out_of_memory(*_: Any) -> None:
            raise RuntimeError("out of memory")

        hvd.init()
        if hvd.rank() == 1:
            execute.allreduce = out_of_memory
        try:
            hvd.allreduce(torch.ones(300), name="large")
        except hvd.HorovodInternalError:
            hvd.shutdown()
        hvd.init()

    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    with pytest.raises(WorkerFailedError, match="rank 1 cannot initialize again: others may still wait") as failure:
        launcher.options(env=env).run(train)
    assert failure.value.rank == 1


def test_after_the_death_of_a_rank_there_is_nobody_to_go_on_with(launcher: Launcher) -> None:
    def train() -> None:
        import os

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            os._exit(9)
        while True:
            try:
                hvd.allreduce(torch.ones(300), name="gradient")
            except hvd.HorovodInternalError:
                hvd.shutdown()
                hvd.init()

    with pytest.raises(WorkerFailedError) as failure:
        launcher.run(train)
    assert (failure.value.rank, failure.value.exit_code) == (1, 9)


def test_a_group_that_the_user_has_destroyed_does_not_stop_the_end(launcher: Launcher) -> None:
    def train() -> float:
        import torch
        import torch.distributed as dist

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        hvd.barrier()
        dist.destroy_process_group()
        hvd.shutdown()
        hvd.init()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert launcher.run(train) == 2
