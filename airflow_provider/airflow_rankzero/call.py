"""The arguments of a training as its ranks get them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankzero.errors import InvalidJobError


def positional(op_args: Any) -> tuple[Any, ...]:
    """``op_args`` for the ranks. Raises InvalidJobError if it is no list."""
    if isinstance(op_args, (str, bytes, Mapping)) or not isinstance(op_args, Iterable):
        raise InvalidJobError(f"op_args is {op_args!r}; it must be a list of arguments")
    return tuple(plain(list(op_args)))


def keyword(op_kwargs: Any) -> dict[str, Any]:
    """``op_kwargs`` for the ranks. Raises InvalidJobError if it is no mapping."""
    if not isinstance(op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {op_kwargs!r}; it must map names to arguments")
    return dict(plain(dict(op_kwargs)))


def plain(value: Any) -> Any:
    """``value`` with the lazy sequences of mapped tasks, also inside lists, tuples and dicts, as lists.

    The ranks cannot ask Airflow for their items.
    """
    from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence

    if type(value) is list or isinstance(value, LazyXComSequence):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value
