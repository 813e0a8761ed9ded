"""Every collective against its formula; types, operations and orders: test_hvd_orders.py."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.kit import TasksEngine

import rankzero.compat.horovod.torch as hvd
from rankzero import Launcher


def check(what: Any, found: Any, expected: Any) -> None:
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), f"{what}: {found} is not {expected}"


def values() -> None:
    rank, size = hvd.rank(), hvd.size()
    check("scaled", hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
          torch.full((2,), 2.0 * size))  # fmt: skip
    large = (1 << 40) + 3
    check("scaled integers", hvd.allreduce(torch.tensor([large]), op=hvd.Max, prescale_factor=3.0), [3 * large])
    check("average of integers", hvd.allreduce(torch.tensor([-(1 << 60) - 1])), [-(1 << 60) - 1])
    pair = hvd.grouped_allreduce([torch.tensor(1.0), torch.ones(3)], op=hvd.Sum)
    check("a scalar before others", torch.cat([pair[0][None], pair[1]]), torch.full((4,), float(size)))
    # The average is cut off once, behind its factor.
    one = torch.full((300,), 1 if rank == 0 else 0)
    check("scaled average of integers", hvd.allreduce(one, postscale_factor=size), torch.ones(300, dtype=torch.int64))
    for count in (2, 400):
        with torch.inference_mode():
            later = [hvd.allreduce_async_(torch.ones(count), op=hvd.Sum, name=f"inference.{i}") for i in range(2)]
            for total in hvd.synchronize(later):
                check("inference mode", total, torch.full((count,), float(size)))
    check("too large", hvd.allreduce(torch.tensor([3e38]), op=hvd.Product, postscale_factor=1e10), [float("inf")])
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == []

    rows, came = hvd.alltoall(torch.full((sum(range(size + 1)),), rank), splits=list(range(1, size + 1)))
    check("alltoall", rows, torch.arange(size).repeat_interleave(rank + 1))
    check("alltoall splits", came, torch.full((size,), rank + 1, dtype=torch.int32))
    later = hvd.grouped_reducescatter_async([torch.arange(5.0), torch.ones(1, 2)], prescale_factor=2.0)
    shares = hvd.synchronize(later)
    check("grouped reducescatter", hvd.allgather(shares[0]), torch.arange(5.0) * 2)
    check("rows for the first rank alone", len(shares[1]), 1 if rank == 0 else 0)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2):
        moved = torch.full((2, 3), rank % 2).to(dtype)
        check(f"allgather {dtype}", hvd.allgather(moved[rank % 2 :]).float(),
              torch.cat([torch.full((2 - other % 2, 3), float(other % 2)) for other in range(size)]))  # fmt: skip
        check(f"broadcast {dtype}", hvd.broadcast(moved, size - 1).float(),
              torch.full((2, 3), float((size - 1) % 2)))  # fmt: skip

    inplace = torch.full((4,), float(rank))
    assert hvd.allreduce_(inplace, op=hvd.Sum) is inplace
    check("in place", inplace, torch.full((4,), float(sum(range(size)))))
    gathered = hvd.grouped_allgather([torch.full((2,), rank), torch.full((1, 2), rank)])
    check("grouped gather", gathered[0], torch.arange(size).repeat_interleave(2))
    # Messages of any length.
    assert hvd.broadcast_object("x" * 5000 if rank == 0 else None) == "x" * 5000
    assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]


def gradients() -> None:
    """Horovod's: those of what was gathered or broadcast are averaged."""
    rank, size = hvd.rank(), hvd.size()
    rows = sum(range(size + 1))
    mean = rows / size

    def gradient(of: Any, call: Any) -> Any:
        of = of.requires_grad_()
        (call(of) * (rank + 1)).sum().backward()
        return of.grad

    start = sum(range(rank + 1))
    weights = torch.arange(1.0, rows + 1)[:, None]
    found = gradient(torch.ones(rank + 1, 2), lambda x: hvd.allgather(x) * weights)
    torch.testing.assert_close(found[:, 0], torch.arange(start + 1.0, start + rank + 2) * mean)
    for op, factor in ((hvd.Sum, float(rows)), (hvd.Average, mean)):
        check(op, gradient(torch.ones(3), lambda x, op=op: hvd.allreduce(x, op=op)), torch.full((3,), factor))
        pair = torch.ones(3), torch.ones(2, requires_grad=True)
        first, second = hvd.grouped_allreduce(pair, op=op)
        ((first.sum() + 2 * second.sum()) * (rank + 1)).backward()
        check(f"grouped {op}", pair[1].grad, torch.full((2,), 2.0 * factor))
        # A sum's gradient is gathered times the ranks, an average's as it is.
        found = gradient(torch.ones(5), lambda x, op=op: hvd.reducescatter(x, op=op))
        owners = hvd.allgather(torch.full((len(torch.ones(5).tensor_split(size)[rank]),), rank + 1.0))
        check(f"reducescatter {op}", found, owners * (size if op == hvd.Sum else 1))
    found = gradient(torch.ones(2), lambda x: hvd.broadcast(x, 0, name="z"))
    check("broadcast", found, torch.full((2,), mean if rank == 0 else 0.0))
    # Rank r gets r + 1 rows of each rank, and multiplies them by r + 1.
    found = gradient(torch.ones(rows, 2), lambda x: hvd.alltoall(x, splits=list(range(1, size + 1)))[0])
    factors = torch.cat([torch.full((other + 1,), other + 1.0) for other in range(size)])
    check("alltoall", found, factors[:, None].expand(-1, 2))


def modes() -> None:
    """A default device and inference mode of a caller do not reach the thread that executes operations."""
    torch.set_default_device("meta")
    for step in range(20):
        gathered = hvd.allgather_async(torch.ones(hvd.rank() + 1, 2, device="cpu"), name=f"rows.{step}")
        with torch.inference_mode():
            hvd.allreduce(torch.ones(300, device="cpu"), name="loss")
        found = hvd.synchronize(gathered)
        assert not found.is_inference()
        assert len(found) == sum(range(hvd.size() + 1))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert len(hvd.elastic.ElasticSampler(range(8 * hvd.size()))) == 8


def join() -> None:
    found = []
    for step in range(hvd.rank() + 1):
        found.append(hvd.allreduce(torch.full((4,), 1.0), op=hvd.Sum)[0].item())
        share = (hvd.size() - step) / hvd.size()
        # Those that have joined count in an average.
        assert hvd.allreduce(torch.ones(3, dtype=torch.float64)).tolist() == pytest.approx([share] * 3)
        several = hvd.grouped_allreduce([torch.ones(2), torch.full((3,), 4)], op=hvd.Sum)
        assert [one.unique().tolist() for one in several] == [[found[-1]], [4 * found[-1]]]
        assert len(hvd.reducescatter(torch.ones(hvd.size(), 1), op=hvd.Sum)) == 1
        hvd.barrier()
    last = hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), "all are back"
    assert found == [float(hvd.size() - step) for step in range(hvd.rank() + 1)]
    assert last == hvd.size() - 1


def shared() -> None:
    """Operations under the same name, or on the same memory, before the end of the first one."""
    large = torch.ones(1 << 24)
    first = hvd.allreduce_async_(large, name="taken")
    if hvd.size() > 1:
        for call in (
            lambda: hvd.allreduce_async_(large[1000:2000], name="again"),
            lambda: hvd.allgather_async(large, name="again"),
            lambda: hvd.broadcast_async_(large.view(2, -1)[1], 0, name="again"),
        ):
            with pytest.raises(ValueError, match=".again' shares memory with one that has not ended"):
                call()
    # Other bytes of one storage, and weights that are tied.
    halves = torch.ones(2, 300)
    first_half = hvd.allreduce_async_(halves[0], name="half")
    hvd.broadcast_parameters({"tied": halves[1], "weight": halves[1]})
    hvd.synchronize(first_half)
    while True:
        try:
            second = hvd.allreduce_async_(torch.ones(300), name="taken")
            break
        except ValueError:
            time.sleep(0.001)
    hvd.synchronize([first, second])
    mean = torch.full((300,), 1.0 + 2 * hvd.rank())
    handle = hvd.allreduce_async_(mean, name="polled")
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert mean.unique().tolist() == [float(hvd.size())]


def run_all() -> None:
    hvd.init()
    for each in (values, gradients, join, shared, modes):
        each()


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective(tmp_path: Path, size: int) -> None:
    Launcher(size, store=tmp_path).run(run_all)


def sets() -> Any:
    odd = hvd.ProcessSet([1])
    hvd.init(process_sets=[odd])
    pair = hvd.add_process_set([0, 2])
    mine = odd if hvd.rank() == 1 else pair
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, process_set=mine)
    from_two = hvd.broadcast(torch.tensor([hvd.rank()]), 2, process_set=pair) if mine is pair else None
    with pytest.raises(ValueError, match="is no member of"):
        hvd.allreduce(torch.ones(1), process_set=pair if mine is odd else odd)
    with pytest.raises(ValueError, match="is there already"):
        hvd.add_process_set([2, 0])
    found = total.item(), mine.size(), mine.rank(), from_two and from_two.item()
    # A set that is made anew counts calls without a name anew, on ranks with and without a past.
    again = hvd.ProcessSet([0, 1])
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(pair)
    hvd.add_process_set(again)
    if hvd.rank() < 2:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (0, 1, 3)
    return hvd.allgather_object((found, hvd.cross_rank()))


def test_sets_of_ranks(tmp_path: Path) -> None:
    """Each rank has a task of its own."""
    found = Launcher(3, engine=TasksEngine(), store=tmp_path).run(sets)
    assert found == [((4.0, 2, 0, 2), 0), ((2.0, 1, 0, None), 1), ((4.0, 2, 1, 2), 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_and_gradients_stay_on_the_gpu(tmp_path: Path) -> None:
    def train() -> None:
        hvd.init()
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        rank, size = hvd.rank(), hvd.size()
        for dtype in (torch.float16, torch.float32, torch.int64):
            mine = torch.full((1_000_000,), rank + 1, dtype=dtype, device=device)
            assert (hvd.allreduce(mine, op=hvd.Sum) == sum(range(size + 1))).all()
            assert (hvd.broadcast(mine, size - 1) == size).all()
        rows = hvd.allgather(torch.full((rank + 1, 2), rank, device=device))
        assert rows[:, 0].tolist() == [other for other in range(size) for _ in range(other + 1)]
        # Beside them, on the CPU.
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
        weights = [torch.nn.Parameter(torch.zeros(1_000_000, device=device)) for _ in range(4)]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        for step in range(1, 51):
            optimizer.zero_grad()
            sum((weight * (rank + 1) * step).sum() for weight in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            assert all((weight.grad == step * (size + 1) / 2).all() for weight in weights)

    Launcher(torch.cuda.device_count(), store=tmp_path).run(train)
