"""What a person wants to know of a value without loading it."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def type_name(value: object) -> str:
    """The name of a value's type, with its module."""
    cls = type(value)
    # Of a person's class, which may have set them to anything.
    module, name = str(cls.__module__), str(cls.__qualname__)
    return name if module == "builtins" else f"{module}.{name}"


def summarize(value: object) -> dict[str, Any]:
    """Type and, of a module or a dict of tensors, how many numbers of which type. Never fails.

    Example:
        >>> summarize([1, 2])
        {'type': 'list'}
    """
    summary: dict[str, Any] = {"type": type_name(value)}
    # Asks objects of the user's, and a training that has finished is worth more than what they answer.
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
        # Of a lazy module, which has seen no data yet.
        return 0
