"""The whole state of an optimizer, for checkpoints that any world size can load."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rankzero.train.model import State, for_loading, kept_on_rank_zero, state_options, unwrap_model
from rankzero.train.process_group import broadcast_object, ensure_process_group

if TYPE_CHECKING:
    import torch
    from torch import nn


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Returns the whole state of an optimizer on rank 0's CPU, by the names of the plain module's parameters.

    Every rank must call it. The optimizer is not changed, not even before its first step.

    Args:
        model: The model whose parameters the optimizer trains.
        optimizer: Made after `prepare_model`.

    Returns:
        ``{"state": ..., "param_groups": ...}``; empty on other ranks.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if not optimizer.state:
        return kept_on_rank_zero(_settings_of(model, optimizer))
    return kept_on_rank_zero(get_optimizer_state_dict(model, optimizer, options=state_options()))


def load_full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Sets the state of an optimizer from what `full_optimizer_state_dict` returned. Every rank must call it.

    Gradients are kept. A parameter that never had a gradient has no state, neither in the dict nor after the call.

    Args:
        model: The model whose parameters the optimizer trains.
        optimizer: Made after `prepare_model`. Its previous state is discarded.
        state: The optimizer's state. Only rank 0's is used: the other ranks may pass the same dict or an empty one.

    Raises:
        KeyError: the optimizer has a parameter that the dict does not contain.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    ensure_process_group()
    names = _names(model, optimizer)
    # Plain SGD has settings and no tensors, so there are no shards that torch could distribute.
    settings, known, stated = broadcast_object(_summary_of(state))
    if missing := [each[0] for each in names.values() if known.isdisjoint(each)]:
        raise KeyError(f"the optimizer's state does not contain the parameters {missing}")
    optimizer.state.clear()
    if settings is not None:
        _load_settings(optimizer, names, settings)
        return
    with _without_gradients(optimizer):
        sent, options = for_loading(state)
        options.strict = False
        set_optimizer_state_dict(model, optimizer, sent, options=options)
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


def _summary_of(state: State) -> tuple[State | None, set[str], set[str]]:
    """Returns the state if it has no tensors, the names of its parameters, and those that have a state."""
    states = state.get("state", {})
    known = {name for group in state.get("param_groups", ()) for name in group["params"]}
    return None if any(states.values()) else state, known, {name for name in states if states[name]}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, list[str]]:
    """Returns the names of each trained parameter in the plain module; a shared one has several."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
        if parameter in trained and parameter.requires_grad:
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
