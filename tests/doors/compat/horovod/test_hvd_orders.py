"""Plans that hypothesis makes up: what is reduced, gathered and broadcast, and in which order each rank issues it."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankzero import Launcher

SIZE = 4

INTEGERS = ("uint8", "int8", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")  # Together with bool: the types that torch's gloo has


class Operation(NamedTuple):
    """One collective: rank r's tensor is full of r + 1, of ``rows`` rows (of r more, in a gather) and 3 columns."""

    kind: str
    dtype: str
    rows: int
    op: str = "Sum"
    root: int = 0


class Plan(NamedTuple):
    """Operations, and in which order each rank issues them and waits for them."""

    operations: list[Operation]
    issued: list[list[int]]
    awaited: list[list[int]]


# Those of more than 1 MiB are not fused.
ROWS = st.sampled_from([0, 1, 2, 40, 50_000])


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    dtype = draw(st.sampled_from(("bool", *INTEGERS, *FLOATS)))
    kind = draw(st.sampled_from(["allreduce", "allreduce_", "grouped", "allgather", "broadcast", "alltoall"]))
    ops = ["Sum", "Min", "Max", "Product", *(["Average"] if dtype != "bool" else [])]
    return Operation(kind, dtype, draw(ROWS), draw(st.sampled_from(ops)), draw(st.integers(0, SIZE - 1)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    chosen = draw(st.lists(operations(), min_size=1, max_size=8))
    order = st.permutations(range(len(chosen)))
    return Plan(chosen, [draw(order) for _ in range(SIZE)], [draw(order) for _ in range(SIZE)])


def made_up(count: int) -> list[Plan]:
    """Plans; hypothesis draws others in each run of the suite."""
    found: list[Plan] = []

    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(plans())
    def collect(plan: Plan) -> None:
        found.append(plan)

    collect()
    return found


def check(plan: Plan) -> str | None:
    """Carries a plan out in a rank; what is wrong, if anything is."""
    import torch

    import rankzero.compat.horovod.torch as hvd

    rank = hvd.rank()

    def tensor(operation: Operation, of: int) -> Any:
        more = of if operation.kind == "allgather" else 0
        rows = operation.rows * SIZE if operation.kind == "alltoall" else operation.rows + more
        return torch.full((rows, 3), of + 1).to(getattr(torch, operation.dtype))

    def issue(index: int) -> Any:
        operation, name = plan.operations[index], f"{index}"
        mine, op = tensor(operation, rank), operation.op
        return {
            "allreduce": lambda: hvd.allreduce_async(mine, name=name, op=op),
            "allreduce_": lambda: hvd.allreduce_async_(mine, name=name, op=op),
            "grouped": lambda: hvd.grouped_allreduce_async([mine, mine[:1]], name=name, op=op),
            "allgather": lambda: hvd.allgather_async(mine, name=name),
            "broadcast": lambda: hvd.broadcast_async(mine, operation.root, name=name),
            "alltoall": lambda: hvd.alltoall_async(mine, name=name),
        }[operation.kind]()

    def expected(operation: Operation) -> Any:
        every = [tensor(operation, of) for of in range(SIZE)]
        if operation.kind == "broadcast":
            return every[operation.root]
        if operation.kind == "allgather":
            return torch.cat(every)
        if operation.kind == "alltoall":
            return torch.cat([one[: operation.rows] for one in every])
        stacked = torch.stack(every)
        if operation.op == "Product":
            return stacked.prod(0, dtype=stacked.dtype)
        if operation.op in ("Min", "Max"):
            return every[0] if operation.op == "Min" else every[-1]
        total = stacked.sum(0, dtype=stacked.dtype)
        if operation.op == "Average":
            is_whole = operation.dtype in INTEGERS
            total = torch.div(total, SIZE, rounding_mode="trunc") if is_whole else total / SIZE
        return total.to(stacked.dtype)

    handles = {index: issue(index) for index in plan.issued[rank]}
    for index in plan.awaited[rank]:
        found, operation = hvd.synchronize(handles[index]), plan.operations[index]
        whole, parts = expected(operation), found if operation.kind == "grouped" else [found]
        # The second one of a group is the first row.
        if not all(map(torch.equal, parts, [whole, whole[:1]])):
            return f"rank {rank}, {operation}: {found} is not {whole}, of {plan}"
    return None


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.soak)])
def test_any_operations_in_any_order_on_four_ranks(tmp_path: Path, count: int) -> None:
    def train(plans: list[Plan]) -> list[str]:
        import torch

        import rankzero.compat.horovod.torch as hvd
        import rankzero.train as rt

        torch.set_num_threads(1)
        hvd.init()
        wrong: list[str | None] = []
        for plan in plans:
            wrong += rt.all_gather_object(check(plan))
        return [message for message in wrong if message]

    assert Launcher(SIZE, store=tmp_path).run(train, made_up(count)) == []
