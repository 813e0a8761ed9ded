"""Broadcasts of parameters and of the state of an optimizer; broadcasts and gathers of any objects, by cloudpickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch

from rankzero.compat.horovod.torch.messages import bytes_of
from rankzero.compat.horovod.torch.ops import allgather, broadcast_, broadcast_async_
from rankzero.compat.horovod.torch.pending import synchronize
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copies one rank's parameters to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or tensors.
        root_rank: Global rank whose parameters are copied.
        process_set: The ranks that take part.

    Raises:
        ValueError: ``params`` is neither a mapping nor a list, or has a part that is not a tensor with data.
        StallError: a rank has a parameter that another rank lacks.
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
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the ``state_dict`` of one rank's optimizer to all ranks, also into new optimizers without state.

    Args:
        optimizer: The optimizer, wrapped or not.
        root_rank: Global rank whose state is copied.
        model: Unused; accepted for compatibility.
        process_set: The ranks that take part.
    """
    is_root = global_process_set.rank() == root_rank
    file = io.BytesIO()
    packer = _Packer(file)
    if is_root:
        packer.dump(optimizer.state_dict())
    data = broadcast_object(file.getvalue(), root_rank, "optimizer.state", process_set)
    if is_root:
        tensors = packer.tensors
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unpacker = _Unpacker(data, next((parameter.device for parameter in parameters), torch.device("cpu")))
        state, tensors = unpacker.load(), unpacker.tensors
    synchronize(
        [broadcast_async_(tensor, root_rank, f"optimizer.{index}", process_set) for index, tensor in enumerate(tensors)]
    )
    if not is_root:
        optimizer.load_state_dict(state)


class _Packer(pickle.Pickler):
    """Pickles an object without its tensors, which it collects at any depth."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided:
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype, obj.device.type


class _Unpacker(pickle.Unpickler):
    """Unpickles an object with new, empty tensors, which it collects."""

    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_load(self, pid: Any) -> torch.Tensor:
        shape, dtype, device = pid
        self.tensors.append(torch.empty(shape, dtype=dtype, device="cpu" if device == "cpu" else self._device))
        return self.tensors[-1]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """An object of one rank, on every rank."""
    name = name or "broadcast_object"
    is_root = global_process_set.rank() == root_rank
    data = (
        torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
        if is_root
        else torch.empty(0, device="cpu")
    )
    length = broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    data = broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(bytes_of(data))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    name = name or "allgather_object"
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    sizes = allgather(torch.tensor([len(data)], device="cpu"), f"{name}.sizes", process_set).tolist()
    whole = allgather(data, f"{name}.data", process_set)
    return [pickle.loads(bytes_of(part)) for part in torch.split(whole, sizes)]
