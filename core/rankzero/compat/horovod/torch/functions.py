"""Collectives of objects, parameters and the states of optimizers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch

from rankzero.compat.horovod.torch.collectives import allgather_async, broadcast_, broadcast_async_, synchronize
from rankzero.compat.horovod.torch.operations import to_bytes
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = WORLD
) -> Any:
    """Returns an object of one rank, on every rank."""
    is_root, name = WORLD.rank() == root_rank, name or "broadcast_object"
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = int(broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.size", process_set))
    data = broadcast_(data if is_root else data.new_empty(length), root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(to_bytes(data))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = WORLD) -> list[Any]:
    """Returns every rank's object, in the order of ranks."""
    request = allgather_async(_packed(obj), name or "allgather_object", process_set)
    return [pickle.loads(to_bytes(part)) for part in torch.split(request.wait(), request.rows[0])]


def _packed(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = WORLD
) -> None:
    """Copies the parameters of ``root_rank`` to all ranks, in place.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors; anything else is a
    ValueError. A parameter of another shape or type on another rank is a MismatchError.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, (list, tuple)) or hasattr(params, "__next__"):
        pairs = [part if isinstance(part, tuple) else (str(index), part) for index, part in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params).__name__}; give model.state_dict()")
    pairs = [(name, value) for name, value in pairs if value is not None]
    for name, value in pairs:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise ValueError(f"parameter {name!r} is no tensor with data: use hvd.broadcast_object, or to_empty()")
    synchronize([broadcast_async_(value, root_rank, f"parameter.{name}", process_set) for name, value in pairs])


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None, process_set: ProcessSet = WORLD
) -> None:
    """Copies the ``state_dict`` of one rank's optimizer to all ranks, also into new optimizers without state.

    ``model`` is unused, and accepted for compatibility.
    """
    state = broadcast_state(optimizer.state_dict(), root_rank, "optimizer.state", process_set)
    if WORLD.rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_state(state: Any, root_rank: int, name: str, process_set: ProcessSet = WORLD) -> Any:
    """Returns the state of one rank on every rank. Its tensors arrive on the CPU; ``load_state_dict`` moves them."""
    is_root, file = WORLD.rank() == root_rank, io.BytesIO()
    if is_root:
        torch.save(state, file, pickle_module=cloudpickle)
    data = broadcast_object(file.getvalue(), root_rank, name, process_set)
    return state if is_root else torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
