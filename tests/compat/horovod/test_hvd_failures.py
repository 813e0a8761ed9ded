"""Ranks that disagree, skip, or die: the tensor and the ranks are named, at once."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import HangError, Launcher, WorkerFailedError


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path)


def test_shapes_types_and_operations_that_differ(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank, messages = hvd.rank(), []
        for name, call in {
            "shape": lambda: hvd.allreduce(torch.ones(2 + rank), name="x"),
            "type": lambda: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int64][rank]), name="y"),
            "op": lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Min][rank], name="z"),
            "root": lambda: hvd.broadcast(torch.ones(2), rank, name="w"),
            "tail": lambda: hvd.allgather(torch.ones(2, 1 + rank), name="v"),
        }.items():
            try:
                call()
            except hvd.MismatchError as error:
                messages.append(f"{name} {error}")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2, "the rest goes on"
        return hvd.allgather_object(messages)

    ours, theirs = launcher.run(train)
    assert ours == theirs
    shape, dtype, op, root, tail = ours
    assert shape == (
        "shape 'allreduce.x' is not the same on all ranks: rank 0: allreduce Average torch.float32 [2]; "
        "rank 1: allreduce Average torch.float32 [3]"
    )
    assert "torch.int64" in dtype
    assert "Min" in op
    assert "of rank 1" in root
    assert "[2]" in tail


def test_a_rank_that_skips_a_tensor_and_goes_on(launcher: Launcher) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(2), name=["left", "right"][hvd.rank()])

    with pytest.raises(
        WorkerFailedError, match="'allreduce.left' was issued by rank .0., but rank .1. has not"
    ) as failure:
        launcher.run(train)
    assert failure.value.exception_type is not None
    assert failure.value.exception_type.endswith("StallError")


def test_a_rank_that_returns_without_it(launcher: Launcher) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(2), name="gradient")

    with pytest.raises(WorkerFailedError, match="'allreduce.gradient' was issued by rank .0., but rank .1. has ended"):
        launcher.run(train)


def test_a_rank_that_computes_on_is_waited_for_with_a_warning_and_not_for_ever(tmp_path: Path) -> None:
    def train(shut_down: bool) -> str:
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            # As long as the others' warning, or their error, takes, and an answer of each to the other's question.
            time.sleep(600 if shut_down else 7)
        hvd.allreduce(torch.ones(2), name="gradient")
        return "waited"

    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    handle = Launcher(3, store=tmp_path, env=env).submit(train, False)
    assert handle.result(60) == "waited"
    for rank in (0, 2):
        warned = [line for line in handle.logs(rank) if f"rank {rank} has waited" in line]
        assert any(line.endswith("for rank [1] to issue 'allreduce.gradient'") for line in warned), warned

    # Time enough for the other rank, too, to begin its round and to answer.
    env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "10"
    named = r"rank \d has waited \d+ s for rank \[1\] to issue 'allreduce.gradient'"
    with pytest.raises(WorkerFailedError, match=named) as failure:
        Launcher(3, store=tmp_path, env=env).run(train, True)
    assert failure.value.rank in (0, 2)


def test_a_rank_that_dies_is_the_first_cause(launcher: Launcher) -> None:
    def train() -> None:
        import os

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            os._exit(9)
        hvd.allreduce(torch.ones(2), name="gradient")

    with pytest.raises(WorkerFailedError) as failure:
        launcher.run(train)
    assert (failure.value.rank, failure.value.exit_code) == (1, 9)


def test_bad_calls_are_refused(launcher: Launcher) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.rank()
        hvd.init()
        one = torch.ones(1)
        with pytest.raises(NotImplementedError, match="Adasum is not supported"):
            hvd.allreduce(one, op=hvd.Adasum)
        with pytest.raises(ValueError, match="not both"):
            hvd.allreduce(one, average=True, op=hvd.Sum)
        with pytest.raises(TypeError, match="takes a torch.Tensor, not a list"):
            hvd.allreduce([1.0])
        for dtype in (torch.uint16, torch.float8_e5m2):
            with pytest.raises(TypeError, match=f"does not reduce tensors of {dtype}"):
                hvd.allreduce(torch.ones(1000).to(dtype))
        with pytest.raises(TypeError, match="takes a dense tensor"):
            hvd.allreduce(torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match="share their memory"):
            hvd.allreduce_(torch.ones(1).expand(4))
        with pytest.raises(ValueError, match="root_rank is 7"):
            hvd.broadcast(one, 7)
        with pytest.raises(ValueError, match="needs splits"):
            hvd.alltoall(torch.ones(3))
        with pytest.raises(ValueError, match="add up to 2 rows"):
            hvd.alltoall(torch.ones(2), splits=[1, 2])
        with pytest.raises(ValueError, match="not a scalar"):
            hvd.allgather(torch.tensor(1.0))
        for rows in (1, 1000):
            with pytest.raises(TypeError, match="torch.bool has no average"):
                hvd.allreduce(torch.ones(rows, dtype=torch.bool))
            for op in (hvd.Min, hvd.Max, hvd.Product):
                with pytest.raises(TypeError, match=f"op is hvd.{op}.* torch.complex64 "):
                    hvd.allreduce(torch.ones(rows, dtype=torch.complex64), op=op)
        handle = hvd.allreduce_async(one, name="twice")
        hvd.synchronize(handle)
        if hvd.rank() == 0:
            # Its peer issues it only after the second call was refused.
            late = hvd.allreduce_async(one, name="late")
            with pytest.raises(ValueError, match="was issued again before"):
                hvd.allreduce_async(one, name="late")
        hvd.broadcast_object("refused")
        hvd.synchronize(late if hvd.rank() == 0 else hvd.allreduce_async(one, name="late"))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="not named: 1 of"):
            hvd.DistributedOptimizer(optimizer, list(model.named_parameters())[:1])
        with pytest.raises(ValueError, match="Found duplicates: weight"):
            hvd.DistributedOptimizer(optimizer, [("weight", parameter) for parameter in model.parameters()])
        assert not hvd.mpi_built()
        assert hvd.gloo_built()
        assert hvd.cuda_built() == (torch.version.cuda is not None)
        assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
        hvd.start_timeline("timeline.json")
        hvd.stop_timeline()

    launcher.run(train)


def test_a_rank_that_has_joined_has_nothing_to_gather(launcher: Launcher) -> None:
    def train() -> None:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            with pytest.raises(hvd.MismatchError, match="needs data of rank .0., which has joined"):
                hvd.allgather(torch.ones(3), name="x")
            with pytest.raises(hvd.MismatchError, match="only sums and averages"):
                hvd.allreduce(torch.ones(300), name="y", op=hvd.Min)
        hvd.join()

    launcher.run(train)


def test_a_rank_that_hangs_is_seen_while_its_peer_waits_for_it_to_shut_down(launcher: Launcher) -> None:
    def train() -> None:
        import time

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            time.sleep(600)

    handle = launcher.options(hang_timeout=4.0).submit(train)
    try:
        with pytest.raises(HangError):
            handle.result(60)
    finally:
        handle.cancel()
