"""Summarizes a value for display without loading it: type, tensors, parameters, bytes."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module."""
    cls = type(value)
    # A user's class may have set these to any object.
    module, name = str(cls.__module__), str(cls.__qualname__)
    return name if module == "builtins" else f"{module}.{name}"


def summarize(value: object) -> dict[str, Any]:
    """Returns the type of a value and, for a module or a dict of tensors, counts by data type. Never fails.

    Example:
        >>> summarize([1, 2])
        {'type': 'list'}
    """
    summary: dict[str, Any] = {"type": type_name(value)}
    # Objects of the user may raise anything, and that must not fail a training that has finished.
    with contextlib.suppress(Exception):
        summary |= _count(value)
    return summary


def _count(value: object) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    state = dict(value.named_parameters()) if isinstance(value, torch.nn.Module) else value
    if not isinstance(state, dict):
        return {}
    tensors = [item for item in state.values() if isinstance(item, torch.Tensor)]
    if not tensors:
        return {}
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        numbers = _numbers(tensor)
        count = dtypes.setdefault(str(tensor.dtype).removeprefix("torch."), {"tensors": 0, "parameters": 0, "bytes": 0})
        count["tensors"] += 1
        count["parameters"] += numbers
        count["bytes"] += numbers * tensor.element_size()
    return {
        "tensors": len(tensors),
        "parameters": sum(count["parameters"] for count in dtypes.values()),
        "dtypes": dtypes,
    }


def _numbers(tensor: torch.Tensor) -> int:
    try:
        return tensor.numel()
    except Exception:
        # A parameter of a lazy module that has seen no data yet.
        return 0
