"""Collectives other than reductions, matched by name: of tensors, of objects and of parameters."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from rankzero.compat.horovod.torch.operations import Request, to_bytes
from rankzero.compat.horovod.torch.reductions import (
    allgather_async,
    allreduce,
    checked,
    copied,
    differentiable,
    gradient_of,
    issue,
    single,
    synchronize,
    written_into,
)
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD

Splits = torch.Tensor | Sequence[int] | None


def _begin_alltoall(tensor: torch.Tensor, splits: Splits, name: str | None, group: ProcessSet) -> Request:
    """Starts an alltoall, whose result is the rows, and how many came from each rank."""
    size, rows = group.size(), len(tensor)
    if splits is None and rows % size:
        raise ValueError(f"alltoall of {rows} rows to {size} ranks needs splits")
    counts = [rows // size] * size if splits is None else [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"splits are {counts}; {size} counts are needed that add up to {rows} rows")

    def finish(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        return request.tensors[0], torch.tensor(request.rows[0], dtype=torch.int32, device="cpu")

    return issue("alltoall", [tensor], name, group, finish, splits=counts)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts an `alltoall`; `synchronize` returns its result."""
    request = _begin_alltoall(tensor, splits, name, process_set)
    return single(request) if splits is None else request


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Sends rows to every rank; differentiable.

    Returns:
        The rows from every rank; with ``splits`` also how many came from each.
    """

    def backward(rows: list[list[int]], gradients: list[torch.Tensor]) -> Any:
        return [alltoall(gradients[0], rows[0], gradient_of(name), process_set)[0]]

    found = differentiable(
        lambda them: _begin_alltoall(them[0], splits, name, process_set), backward, [checked(tensor)]
    )
    return found[0] if splits is None else tuple(found)


def _begin_broadcast(tensor: torch.Tensor, root: int, name: str | None, group: ProcessSet) -> Request:
    if group.coordinator and root not in group.ranks:
        raise ValueError(f"root_rank is {root}; the ranks are {group.ranks}")
    sent, finish = written_into([tensor])
    return issue("broadcast", sent, name, group, finish, ("", group.ranks.index(root), 1.0, 1.0))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> Request:
    """Starts a broadcast into the tensor; `synchronize` returns it."""
    return single(_begin_broadcast(tensor, root_rank, name, process_set))


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Request:
    """Starts a broadcast; `synchronize` returns a new tensor."""
    return broadcast_async_(copied(tensor), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Copies the tensor of ``root_rank`` into the given tensor, and returns it. As `broadcast`."""
    found: torch.Tensor = broadcast_async_(tensor, *args, **kwargs).wait()
    return found


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = WORLD
) -> torch.Tensor:
    """Returns the tensor of ``root_rank`` on every rank; differentiable."""

    def backward(_: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the average on the root, as in Horovod, and zero on other ranks."""
        average = allreduce(gradients[0], name=gradient_of(name), process_set=process_set)
        return [average if WORLD.rank() == root_rank else torch.zeros_like(average)]

    return differentiable(
        lambda them: _begin_broadcast(copied(*them), root_rank, name, process_set), backward, [tensor]
    )[0]


def barrier(process_set: ProcessSet = WORLD) -> None:
    """Waits until every rank of the set has called it."""
    issue("barrier", [torch.empty(0, device="cpu")], None, process_set, lambda _: None).wait()


def join(device: int = -1) -> int:
    """Announces that this rank has no more data; it adds zeros to other ranks' reductions until all have joined.

    Returns:
        The rank that joined last.
    """
    return WORLD.coordinator.join()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Returns an object of one rank, on every rank."""
    is_root, name = WORLD.rank() == root_rank, name or "broadcast_object"
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = int(broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.size", process_set))
    data = broadcast_(data if is_root else data.new_empty(length), root_rank, f"{name}.data", process_set)
    return obj if is_root else _unpacked(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = WORLD) -> list[Any]:
    """Returns every rank's object, in the order of ranks."""
    request = allgather_async(_packed(obj), name or "allgather_object", process_set)
    return [_unpacked(part) for part in torch.split(request.wait(), request.rows[0])]


def _packed(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(to_bytes(data))


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = WORLD
) -> None:
    """Copies one rank's parameters to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or tensors.
        root_rank: Global rank whose parameters are copied.
        process_set: The ranks that take part.

    Raises:
        ValueError: ``params`` is neither a mapping nor a list, or has a part that is not a tensor with data.
        MismatchError: a parameter has another shape or type on another rank.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, (list, tuple)) or hasattr(params, "__next__"):
        pairs = [part if isinstance(part, tuple) else (str(index), part) for index, part in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params).__name__}; give model.state_dict()")
    pairs = [(name, value) for name, value in pairs if value is not None]
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"parameter {name!r} is a {type(value).__name__}, no tensor: use hvd.broadcast_object")
        if value.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device: give it data with module.to_empty() first")
    synchronize([broadcast_async_(value, root_rank, f"parameter.{name}", process_set) for name, value in pairs])


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = WORLD,
) -> None:
    """Copies the ``state_dict`` of one rank's optimizer to all ranks, also into new optimizers without state.

    Args:
        optimizer: The optimizer, wrapped or not.
        root_rank: Global rank whose state is copied.
        model: Unused; accepted for compatibility.
        process_set: The ranks that take part.
    """
    is_root, file = WORLD.rank() == root_rank, io.BytesIO()
    if is_root:
        torch.save(optimizer.state_dict(), file, pickle_module=cloudpickle)
    data = broadcast_object(file.getvalue(), root_rank, "optimizer.state", process_set)
    if not is_root:
        optimizer.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))
