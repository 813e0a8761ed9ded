"""The arguments of a training as its ranks get them: without objects of Airflow, which no rank can import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankzero.errors import InvalidJobError


def positional(op_args: Any) -> tuple[Any, ...]:
    """``op_args`` for the ranks. Raises InvalidJobError if it is no list, or as `plain`."""
    if isinstance(op_args, (str, bytes, Mapping)) or not isinstance(op_args, Iterable):
        raise InvalidJobError(f"op_args is {op_args!r}; it must be a list of arguments")
    return tuple(plain(list(op_args), "op_args"))


def keyword(op_kwargs: Any) -> dict[str, Any]:
    """``op_kwargs`` for the ranks. Raises InvalidJobError if it is no mapping, or as `plain`."""
    if not isinstance(op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {op_kwargs!r}; it must map names to arguments")
    return dict(plain(dict(op_kwargs), "op_kwargs"))


def plain(value: Any, name: str) -> Any:
    """Returns an argument, also inside lists, tuples and dicts, with objects of Airflow as plain ones.

    The results of mapped tasks, and of ``.map()``, ``.zip()`` and ``.concat()``, become lists. Airflow's mappings
    become dicts, and an ``ObjectStoragePath`` the text of its path or URL.

    Args:
        value: The argument.
        name: The expression that led to it, for the error.

    Raises:
        InvalidJobError: any other object of Airflow, or a variable of a template that is not defined.
    """
    of_airflow = type(value).__module__.partition(".")[0] == "airflow"
    if type(value) is tuple:
        return tuple(plain(item, f"{name}[{number}]") for number, item in enumerate(value))
    if type(value) is list or (of_airflow and isinstance(value, Sequence)):
        return [plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is dict or (of_airflow and isinstance(value, Mapping)):
        return {key: plain(value[key], f"{name}[{key!r}]") for key in value}
    if of_airflow:
        return _text_of_path(value, name)
    if type(value).__module__ == "jinja2.runtime" and hasattr(value, "_undefined_message"):
        raise InvalidJobError(f"{name} is a template whose variable is not defined: {value._undefined_message}")
    return value


def _text_of_path(value: Any, name: str) -> str:
    from airflow.sdk import ObjectStoragePath

    if isinstance(value, ObjectStoragePath):
        # Without the connection, which no rank can look up.
        return value.path if value.protocol in ("", "file") else f"{value.protocol}://{value.path}"
    raise InvalidJobError(
        f"{name} is a {type(value).__qualname__} of Airflow, which ranks cannot import: give the plain values in it "
        "that the training needs"
    )
