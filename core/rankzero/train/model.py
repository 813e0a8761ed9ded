"""Moves a model to its rank's device, wraps it for parallel training, and gathers and restores whole states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rankzero.train.context import get_context
from rankzero.train.process_group import broadcast_object, ensure_process_group
from rankzero.values.pickled import is_dense, is_sharded

if TYPE_CHECKING:
    import torch
    from torch import nn

State = dict[str, Any]


def prepare_model(
    model: nn.Module,
    strategy: Literal["ddp", "fsdp"] | None = "ddp",
    *,
    units: Iterable[type] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Moves a model to this rank's device and makes it train in parallel with the other ranks' copies.

    Every rank starts with rank 0's weights. Make the optimizer after this call.

    Args:
        model: A module, on any device.
        strategy: ``"ddp"`` (`torch.nn.parallel.DistributedDataParallel`; a world of one rank, or a model without
            trainable parameters, is only moved), ``"fsdp"`` (`torch.distributed.fsdp.fully_shard`, in place), or None:
            only moved.
        units: For ``"fsdp"``: classes of the modules whose parameters are gathered together. None: the members of each
            `torch.nn.ModuleList`, and the classes that a Hugging Face model names in ``_no_split_modules``.
        kwargs: Passed to ``DistributedDataParallel`` or ``fully_shard`` (such as ``mp_policy``).

    Raises:
        TypeError: the model is wrapped already.
        ValueError: an unknown strategy, an argument of another strategy, or a model that is sharded already.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> rt.prepare_model(torch.nn.Linear(4, 2))
        Linear(in_features=4, out_features=2, bias=True)
    """
    import torch

    if strategy not in ("ddp", "fsdp", None):
        raise ValueError(f"strategy is {strategy!r}; it must be 'ddp', 'fsdp' or None")
    if strategy != "fsdp" and units is not None:
        raise ValueError(f"units= belongs to strategy='fsdp', not to {strategy!r}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; give a torch.nn.Module")
    if unwrap_model(model) is not model and not _is_compiled(model):
        raise TypeError(f"the model is wrapped already, in {type(model).__name__}; give the plain module")
    if strategy and any(map(is_sharded, model.parameters())):
        raise ValueError("the model is sharded or tensor-parallel already: call torch's fully_shard yourself")
    device = get_context().device
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    if strategy == "fsdp":
        return _shard(model, device, units, kwargs)
    model = model.to(device)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if strategy is None or get_context().world_size == 1 or not is_trained:
        return model
    ensure_process_group()
    own: dict[str, Any] = {} if device.type == "cpu" else {"device_ids": [device.index]}
    return torch.nn.parallel.DistributedDataParallel(model, **{**own, **kwargs})


def _shard(model: nn.Module, device: torch.device, units: Iterable[type] | None, kwargs: dict[str, Any]) -> nn.Module:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ensure_process_group()
    if "mesh" not in kwargs:
        kwargs = {**kwargs, "mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        model = model.to(device)
        # `fully_shard` fills the shard of each rank from that rank's parameters.
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
    members = {id(part) for module in model.modules() if isinstance(module, nn.ModuleList) for part in module}
    names, classes = set(getattr(model, "_no_split_modules", None) or ()), tuple(units or ())
    for module in reversed(list(model.modules())[1:]):
        is_default = id(module) in members or type(module).__name__ in names
        if isinstance(module, classes) if units is not None else is_default:
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the user's module without the wrappers of ``DistributedDataParallel`` and ``torch.compile``."""
    import torch

    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        return unwrap_model(model.module)
    return unwrap_model(model._orig_mod) if _is_compiled(model) else model  # type: ignore[arg-type]


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod")


def full_state_dict(model: nn.Module) -> State:
    """Returns a copy of a model's whole weights on rank 0's CPU, by the plain module's names. Every rank must call it.

    Args:
        model: Plain, in ``DistributedDataParallel``, or sharded.

    Returns:
        Name to tensor, which later steps do not change; empty on other ranks.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model, options=_options())
    # torch returns the live tensors of a CPU. Those that it has gathered are not copied, which would double the memory.
    begin: Any = lambda tensor: tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()  # noqa: E731
    own: Any = [*model.parameters(), *model.buffers()]
    parts = [each.to_local() if is_sharded(each) else each for each in own]
    live = {begin(part) for part in parts if is_dense(part)}
    gathered = {id(value): value for value in state.values() if is_dense(value) and begin(value) not in live}
    return copy.deepcopy(state, gathered) if get_context().rank == 0 else {}


def load_full_state_dict(model: nn.Module, state: State) -> None:
    """Sets the weights of a model from what `full_state_dict` returned, for any world size. Every rank must call it.

    Args:
        model: Plain, in ``DistributedDataParallel``, or sharded.
        state: The weights by name. Only rank 0's are used: the other ranks may pass the same dict or an empty one.

    Raises:
        RuntimeError: the weights have other names or shapes than the model's. Every rank raises it.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ensure_process_group()
    own, given = _shapes(get_model_state_dict(model)), broadcast_object(_shapes(state))
    # torch broadcasts a tensor of another shape into a sharded parameter, and only some ranks notice other names.
    if differ := [name for name in {**own, **given} if own.get(name) != given.get(name)]:
        first = f"{differ[0]!r} has the shape {given.get(differ[0])}, and {own.get(differ[0])} in the model"
        raise RuntimeError(f"{len(differ)} weights do not fit the model: {first}")
    # torch renames the keys of the dict that it is given.
    set_model_state_dict(model, dict(state) if get_context().rank == 0 else {}, options=_options(loading=True))


def _options(*, loading: bool = False) -> Any:
    """Returns torch's options for whole states, which are on rank 0: on its CPU if they are not for loading."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=not loading, broadcast_from_rank0=loading)


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the whole shape of each tensor by its name; that of a number for other values."""
    return {name: list(getattr(value, "shape", ())) for name, value in state.items()}
