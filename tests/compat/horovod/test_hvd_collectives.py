"""Every collective against its formula, for every type, operation and number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.kit import TasksEngine

import rankzero.compat.horovod.torch as hvd
from rankzero import Launcher


def values() -> None:
    rank, size = hvd.rank(), hvd.size()

    def check(what: Any, found: Any, expected: Any) -> None:
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), f"{what}: {found} is not {expected}"

    integers = (torch.uint8, torch.int8, torch.int32, torch.int64)
    for dtype in (*integers, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for rows in (1, 40):
            mine = torch.full((rows, 2), rank + 1, dtype=dtype)
            every = torch.stack([torch.full((rows, 2), other + 1, dtype=dtype) for other in range(size)])
            total = every.sum(0, dtype=dtype)
            mean = total / size if dtype.is_floating_point else torch.div(total, size, rounding_mode="trunc")
            what = f"{dtype} {rows}"
            check(f"average {what}", hvd.allreduce(mine, name=f"a.{what}"), mean.to(dtype))
            check(f"sum {what}", hvd.allreduce(mine, op=hvd.Sum, name=f"s.{what}"), total)
            check(f"min {what}", hvd.allreduce(mine, op=hvd.Min, name=f"min.{what}"), every.amin(0))
            check(f"max {what}", hvd.allreduce(mine, op=hvd.Max, name=f"max.{what}"), every.amax(0))
            product = hvd.allreduce(mine, op=hvd.Product, name=f"p.{what}")
            check(f"product {what}", product, every.prod(0, dtype=dtype))
            check(f"broadcast {what}", hvd.broadcast(mine, size - 1), every[size - 1])
            check(f"allgather {what}", hvd.allgather(mine[: rank + 1]),
                  torch.cat([every[other][: other + 1] for other in range(size)]))  # fmt: skip
    check("scaled", hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
          torch.full((2,), 2.0 * size))  # fmt: skip
    large = (1 << 40) + 3
    check("scaled integers", hvd.allreduce(torch.tensor([large]), op=hvd.Max, prescale_factor=3.0), [3 * large])
    # The average is cut off once, behind its factor.
    one = torch.full((300,), 1 if rank == 0 else 0)
    check("scaled average of integers", hvd.allreduce(one, postscale_factor=size), torch.ones(300, dtype=torch.int64))
    for count in (2, 400):
        # Views whose memory is not their value.
        views = torch._neg_view(torch.full((count,), 2.0)), torch.full((count,), 2 + 2j).conj()
        for view in views:
            expected = view.clone() * size
            check("view", hvd.allreduce(view, op=hvd.Sum).clone(), expected)
        with torch.inference_mode():
            later = [hvd.allreduce_async_(torch.ones(count), op=hvd.Sum, name=f"inference.{i}") for i in range(2)]
            for total in hvd.synchronize(later):
                check("inference mode", total, torch.full((count,), float(size)))
    for shape in ((3, 0), (3, 0, 2)):
        check("no columns", hvd.allgather(torch.ones(shape)).shape, (3 * size, *shape[1:]))
    check("fp16", hvd.allreduce(torch.full((3,), 1.5), compression=hvd.Compression.fp16), torch.full((3,), 1.5))
    check("scalar", hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), sum(map(float, range(size))))
    check("too large", hvd.allreduce(torch.tensor([3e38]), op=hvd.Product, postscale_factor=1e10), [float("inf")])
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == []

    rows, came = hvd.alltoall(torch.full((sum(range(size + 1)),), rank), splits=list(range(1, size + 1)))
    check("alltoall", rows, torch.arange(size).repeat_interleave(rank + 1))
    check("alltoall splits", came, torch.full((size,), rank + 1, dtype=torch.int32))
    check("alltoall even", hvd.alltoall(torch.full((size,), rank)), torch.arange(size))
    share = hvd.reducescatter(torch.arange(5.0), op=hvd.Sum)
    check("reducescatter", hvd.allgather(share), torch.arange(5.0) * size)
    later = hvd.grouped_reducescatter_async([torch.arange(5.0), torch.ones(1, 2)], prescale_factor=2.0)
    shares = hvd.synchronize(later)
    check("grouped reducescatter", hvd.allgather(shares[0]), torch.arange(5.0) * 2)
    check("rows for the first rank alone", len(shares[1]), 1 if rank == 0 else 0)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2, torch.bool):
        moved = torch.full((2, 3), rank % 2).to(dtype)
        check(f"allgather {dtype}", hvd.allgather(moved[rank % 2 :]).float(),
              torch.cat([torch.full((2 - other % 2, 3), float(other % 2)) for other in range(size)]))  # fmt: skip
        check(f"broadcast {dtype}", hvd.broadcast(moved, size - 1).float(),
              torch.full((2, 3), float((size - 1) % 2)))  # fmt: skip

    inplace = torch.full((4,), float(rank))
    assert hvd.allreduce_(inplace, op=hvd.Sum) is inplace
    check("in place", inplace, torch.full((4,), float(sum(range(size)))))
    grouped = hvd.grouped_allreduce([torch.ones(3), torch.ones(2, 2)], op=hvd.Sum)
    check("grouped", grouped[1], torch.full((2, 2), float(size)))
    gathered = hvd.grouped_allgather([torch.full((2,), rank), torch.full((1, 2), rank)])
    check("grouped gather", gathered[0], torch.arange(size).repeat_interleave(2))
    later = hvd.grouped_allgather_async([torch.full((2,), rank)], name="later")
    check("grouped gather later", hvd.synchronize(later)[0], torch.arange(size).repeat_interleave(2))
    assert hvd.broadcast_object({"rank": rank} if rank == 0 else None) == {"rank": 0}
    assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]
    hvd.barrier()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)


def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    # Horovod averages the gradients of what was gathered or broadcast.
    x = torch.full((rank + 1, 2), 1.0, requires_grad=True)
    start, rows = sum(range(rank + 1)), sum(range(size + 1))
    for gather in (hvd.allgather, lambda one, name: hvd.grouped_allgather([one], name=name)[0]):
        for name in ("x", None):
            x.grad = None
            (gather(x, name=name) * torch.arange(1.0, rows + 1)[:, None] * (rank + 1)).sum().backward()
            expected = torch.arange(start + 1.0, start + rank + 2) * rows / size
            assert torch.allclose(x.grad[:, 0], expected), (name, x.grad)
    mean = rows / size
    for op, factor in ((hvd.Sum, rows), (hvd.Average, mean)):
        y = torch.ones(3, requires_grad=True)
        (hvd.allreduce(y, op=op) * (rank + 1)).sum().backward()
        assert torch.allclose(y.grad, torch.full((3,), float(factor)))
        pair = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        first, second = hvd.grouped_allreduce(pair, op=op)
        ((first.sum() + 2 * second.sum()) * (rank + 1)).backward()
        assert torch.allclose(pair[1].grad, torch.full((2,), 2.0 * factor))
    z = torch.ones(2, requires_grad=True)
    (hvd.broadcast(z, 0, name="z") * (rank + 1)).sum().backward()
    assert torch.allclose(z.grad, torch.full((2,), mean if rank == 0 else 0.0))
    # Rank r gets r + 1 rows of each rank, and multiplies them by r + 1.
    rows = torch.ones(sum(range(size + 1)), 2, requires_grad=True)
    for name in (None, "rows"):
        got, came = hvd.alltoall(rows, splits=list(range(1, size + 1)), name=name)
        assert not came.requires_grad
        rows.grad = None
        (got * (rank + 1)).sum().backward()
        factors = torch.cat([torch.full((other + 1,), other + 1.0) for other in range(size)])
        assert torch.equal(rows.grad, factors[:, None].expand(-1, 2)), (name, rows.grad)
    even = torch.ones(size, requires_grad=True)
    (hvd.alltoall(even) * (rank + 1)).sum().backward()
    assert torch.equal(even.grad, torch.arange(1.0, size + 1))
    # Horovod's: a sum's gradient is gathered times the ranks, an average's as it is.
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        for scatter in (hvd.reducescatter, lambda one, op: hvd.grouped_reducescatter([one], op=op)[0]):
            whole = torch.ones(5, requires_grad=True)
            share = scatter(whole, op=op)
            (share * (rank + 1)).sum().backward()
            owners = hvd.allgather(torch.full_like(share, rank + 1.0).detach())
            assert torch.equal(whole.grad, owners * factor)


def shared() -> None:
    """Operations under the same name, or on the same memory, before the end of the first one."""
    import time

    hvd.init()
    first = hvd.allreduce_async_(torch.ones(1 << 24), name="taken")
    while True:
        try:
            second = hvd.allreduce_async_(torch.ones(300), name="taken")
        except ValueError:
            time.sleep(0.001)
        else:
            break
    assert first.has_ended
    hvd.synchronize([first, second])
    for count in (100, 1 << 22):
        for step in range(8):
            mine = torch.ones(count)
            # Rank 1 alone has two tensors in one memory, and issues them in another order.
            other = mine if hvd.rank() == 1 else torch.ones(count)
            pair = [("a", mine), ("b", other)] if hvd.rank() == 0 else [("b", other), ("a", mine)]
            hvd.synchronize([hvd.allreduce_async_(one, name=f"{step}.{name}", op=hvd.Sum) for name, one in pair])
            # Whichever is the first, the second has its result as rank 1's tensor.
            assert set(torch.cat([mine, other]).unique().tolist()) == ({3.0} if other is mine else {2.0, 3.0}), (
                count,
                mine,
            )
            ones = torch.ones(count)
            hvd.synchronize([hvd.allreduce_async_(ones, name=f"{step}.{name}", op=hvd.Sum) for name in "cd"])
            assert ones.unique().tolist() == [4.0], (count, ones)
            with torch.inference_mode():
                ones = torch.ones(count)
                later = [hvd.allreduce_async_(ones, name=f"{step}.{name}", op=hvd.Sum) for name in "ef"]
            hvd.synchronize(later)
            assert ones.unique().tolist() == [4.0], (count, ones)
    for count in (4, 1 << 19):
        mean = torch.full((count,), 1.0 + 2 * hvd.rank())
        handle = hvd.allreduce_async_(mean, name=f"polled {count}")
        while not hvd.poll(handle):
            time.sleep(0.001)
        assert mean.unique().tolist() == [2.0]


def test_operations_that_share_a_name_or_memory_follow_one_another(tmp_path: Path) -> None:
    Launcher(2, store=tmp_path).run(shared)


def modes() -> None:
    """A default device and inference mode of a caller do not reach the thread that executes operations."""
    torch.set_default_device("meta")
    for step in range(20):
        rows = torch.ones(hvd.rank() + 1, 2, device="cpu")
        gathered = hvd.allgather_async(rows, name=f"rows.{step}")
        with torch.inference_mode():
            hvd.allreduce(torch.ones(300, device="cpu"), name="loss")
        found = hvd.synchronize(gathered)
        assert not found.is_inference()
        assert len(found) == sum(range(hvd.size() + 1))
    assert hvd.broadcast_object("x" * 5000 if hvd.rank() == 0 else None) == "x" * 5000
    names = [f"{index} {'x' * 100}" for index in range(30)]
    for handle in [hvd.allreduce_async(torch.ones(1, device="cpu"), name=name) for name in names]:
        assert hvd.synchronize(handle).item() == 1
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    with torch.device("cpu"):
        assert list(hvd.elastic.ElasticSampler(range(8)))
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


def run_all() -> None:
    hvd.init()
    for check in (values, gradients, join, modes):
        check()


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
