"""The whole state of an optimizer, for checkpoints that any world size can load."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rankzero.train.model import (
    State,
    copied_on_rank_zero,
    kept_on_rank_zero,
    shapes_of,
    state_options,
    unlike,
    unwrap_model,
)
from rankzero.train.process_group import broadcast_object, ensure_process_group

if TYPE_CHECKING:
    import torch
    from torch import nn


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Returns a copy of an optimizer's whole state on rank 0's CPU, by the names of the plain module's parameters.

    Every rank must call it. The optimizer is not changed, not even before its first step.

    Args:
        model: The model whose parameters the optimizer trains.
        optimizer: Made after `prepare_model`.

    Returns:
        ``{"state": ..., "param_groups": ...}``, which later steps do not change; empty on other ranks.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if not optimizer.state:
        return kept_on_rank_zero(_settings_of(model, optimizer))
    state: State = get_optimizer_state_dict(model, optimizer, options=state_options())
    live = [tensor for each in optimizer.state.values() for tensor in each.values()]
    return copied_on_rank_zero(state, _flat(state).values(), live)


def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Sets the state of an optimizer from what `full_optimizer_state_dict` returned. Every rank must call it.

    Gradients are kept. A parameter that never had a gradient has no state, neither in the dict nor after the call.

    Args:
        model: The model whose parameters the optimizer trains.
        optimizer: Made after `prepare_model`. Its previous state is discarded.
        state: The optimizer's state. Only rank 0's is used: the other ranks may pass the same dict or an empty one.

    Raises:
        KeyError: the optimizer has a parameter that the dict does not contain, or the other way around.
        ValueError: the parameters are grouped in another way than in the dict, or tensors have other shapes. Every rank
            raises these errors.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    ensure_process_group()
    names = _names(model, optimizer)
    # Plain SGD has settings and no tensors, so there are no shards that torch could distribute.
    settings, groups, stated, shapes = broadcast_object(_summary_of(state))
    _check_groups(optimizer, names, groups, stated)
    optimizer.state.clear()
    if settings is not None:
        _load_settings(optimizer, names, settings)
        return
    with _without_gradients(optimizer):
        # torch makes the tensors to load into, and would replace them by tensors of any shape.
        if differ := unlike(shapes, _flat(dict(get_optimizer_state_dict(model, optimizer)))):
            optimizer.state.clear()
            raise ValueError(f"the state does not fit the optimizer by {len(differ)} tensors: {'; '.join(differ[:3])}")
        options = state_options(loading=True)
        options.strict = False
        set_optimizer_state_dict(model, optimizer, kept_on_rank_zero(state), options=options)
    # torch makes a state for every parameter before it loads.
    for parameter, each in names.items():
        if stated.isdisjoint(each):
            optimizer.state.pop(parameter, None)


def _settings_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Returns the state of an optimizer that has no tensors yet.

    torch would create the tensors with a step at a learning rate of 0 and leave them in the optimizer: averages would
    count that step, Rprop and ASGD would keep the 0, and hooks of the step would be called.
    """
    names: dict[torch.Tensor, str] = {}
    for name, parameter in unwrap_model(model).named_parameters():
        names[parameter] = name.replace("_orig_mod.", "")
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise KeyError("the optimizer has a parameter that the model does not have")
    groups = []
    for group, saved in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
        settings = {key: _on_cpu(value) for key, value in saved.items()}
        groups.append({**settings, "params": [names[parameter] for parameter in group["params"]]})
    return {"state": {}, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    """Returns a copy of a setting of an optimizer; tensors, such as a learning rate for CUDA graphs, on the CPU."""
    import torch

    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _load_settings(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, list[str]], settings: State) -> None:
    """Sets each group's settings from the saved group that had one of its parameters, for a state without tensors."""
    saved = {name: group for group in settings["param_groups"] for name in group["params"]}
    groups = optimizer.state_dict()["param_groups"]
    for group, target in zip(optimizer.param_groups, groups, strict=True):
        found = (saved[name] for each in group["params"] for name in names.get(each, ()) if name in saved)
        target.update({key: value for key, value in next(found, {}).items() if key not in ("params", "param_names")})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


def _summary_of(state: State) -> tuple[State | None, list[list[str]], set[str], Any]:
    """Returns the state if it has no tensors, the names in each group, those that have a state, and the shapes."""
    stated = {name for name, each in state.get("state", {}).items() if each}
    groups = [list(group["params"]) for group in state.get("param_groups", ())]
    return None if stated else state, groups, stated, shapes_of(_flat(state))


def _flat(state: State) -> State:
    return {f"{name}.{key}": value for name, each in state.get("state", {}).items() for key, value in each.items()}


def _check_groups(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, list[str]], groups: list[list[str]], stated: set[str]
) -> None:
    """Raises KeyError or ValueError if the saved groups are not the optimizer's; their order may differ."""
    saved = {name: index for index, group in enumerate(groups) for name in group}
    trained = [each for parameter, each in names.items() if parameter.requires_grad]
    if missing := [each[0] for each in trained if saved.keys().isdisjoint(each)]:
        raise KeyError(f"the optimizer's state does not contain the parameters {missing}")
    own = {
        name: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        for name in names.get(parameter, ())
    }
    if surplus := sorted(stated - own.keys()):
        raise KeyError(f"the optimizer does not train the parameters {surplus}, which its state contains")
    pairs = {(index, saved[name]) for name, index in own.items() if name in saved}
    if any(len(set(side)) < len(pairs) for side in zip(*pairs, strict=True)):
        sizes = [len(group["params"]) for group in optimizer.param_groups], [len(group) for group in groups]
        raise ValueError(
            f"the optimizer's groups of {sizes[0]} parameters are not those of its state, of {sizes[1]} parameters: "
            "group the parameters as before"
        )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, list[str]]:
    """Returns the names of each of the optimizer's parameters in the plain module; a shared one has several."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
        if parameter in own:
            names.setdefault(parameter, []).append(name.replace("_orig_mod.", ""))
    return names


@contextlib.contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Removes the gradients in the block: torch creates the tensors to load into with a step only without gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    optimizer.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
