"""Parameters and the state of an optimizer, from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rankzero.compat.horovod.torch.objects import broadcast_object
from rankzero.compat.horovod.torch.ops import broadcast_async_
from rankzero.compat.horovod.torch.pending import synchronize
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """One rank's parameters on all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` as a list, or a list of tensors.
        root_rank: Whose.
        process_set: The ranks that take part.

    Raises:
        ValueError: neither a mapping nor a list.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, (list, tuple)) or hasattr(params, "__next__"):
        pairs = [part if isinstance(part, tuple) else (str(index), part) for index, part in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params).__name__}; give model.state_dict()")
    pending = [
        broadcast_async_(value, root_rank, f"parameter.{name}", process_set)
        for name, value in pairs
        if isinstance(value, torch.Tensor)
    ]
    synchronize(pending)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """One rank's state and options of an optimizer on all ranks; also to a fresh one, which has no state.

    Args:
        optimizer: Wrapped or not.
        root_rank: Whose.
        model: Unused, as in Horovod for most optimizers.
        process_set: The ranks that take part.

    Raises:
        ValueError: L-BFGS, whose state has no fixed shape.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = global_process_set.rank() == root_rank
    plain: dict[str, Any] = {}
    if is_root:
        plain = optimizer.state_dict()
    skeleton = broadcast_object(_skeleton(plain) if is_root else None, root_rank, "optimizer.state", process_set)
    state = skeleton if not is_root else plain
    filled = _filled(state, optimizer)
    tensors = [broadcast_async_(value, root_rank, f"optimizer.{key}", process_set) for key, value in _tensors(filled)]
    synchronize(tensors)
    if not is_root:
        optimizer.load_state_dict(filled)


class _Shape:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type


def _skeleton(state: dict[str, Any]) -> dict[str, Any]:
    """The state with shapes in place of tensors."""
    return {
        "param_groups": [
            {key: _Shape(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in state["param_groups"]
        ],
        "state": {
            index: {key: _Shape(value) if isinstance(value, torch.Tensor) else value for key, value in of_one.items()}
            for index, of_one in state["state"].items()
        },
    }


def _filled(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state with tensors in place of shapes."""
    device = next((parameter.device for group in optimizer.param_groups for parameter in group["params"]), None)

    def fill(value: Any) -> Any:
        if isinstance(value, _Shape):
            return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.device == "cpu" else device)
        return value

    return {
        "param_groups": [{key: fill(value) for key, value in group.items()} for group in state["param_groups"]],
        "state": {
            index: {key: fill(value) for key, value in of_one.items()} for index, of_one in state["state"].items()
        },
    }


def _tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    parts = [(f"group.{index}", group) for index, group in enumerate(state["param_groups"])]
    parts += [(f"state.{index}", of_one) for index, of_one in state["state"].items()]
    return [
        (f"{prefix}.{key}", value)
        for prefix, part in parts
        for key, value in part.items()
        if isinstance(value, torch.Tensor)
    ]
