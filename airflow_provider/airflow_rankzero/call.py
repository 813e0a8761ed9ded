"""The call of a training as its ranks get it: plain arguments, and no way to Airflow's database, API and secrets.

A rank may run where no Airflow is reachable, so a look-up of a variable or connection is refused in every rank.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from airflow.sdk import ObjectStoragePath
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from airflow.sdk.definitions.xcom_arg import PlainXComArg, XComArg

from rankzero.errors import InvalidJobError

logger = logging.getLogger(__name__)

_DATABASE = ("DATABASE__SQL_ALCHEMY_CONN", "DATABASE__SQL_ALCHEMY_CONN_ASYNC", "CORE__SQL_ALCHEMY_CONN")
_BACKEND = ("SECRETS__BACKEND", "WORKERS__SECRETS_BACKEND")

RANK_ENVIRONMENT = {
    # Importing Airflow opens no database.
    "_AIRFLOW__AS_LIBRARY": "1",
    **{f"AIRFLOW__{name}": "ranks-have-no-database-of-airflow://" for name in _DATABASE},
    **{f"AIRFLOW__{name}": "airflow_rankzero.secrets.NoSecrets" for name in _BACKEND},
    **{f"AIRFLOW__{name}_KWARGS": "" for name in _BACKEND},
}
"""Variables of every rank, in place of the worker's."""


def check_context(function: Any, op_args: Any, op_kwargs: Any) -> None:
    """Raises InvalidJobError for a parameter that is named like a variable of Airflow's context and is not passed."""
    if not isinstance(op_args, (list, tuple)) or not isinstance(op_kwargs, Mapping):
        # They come from another task.
        return
    try:
        signature = inspect.signature(function)
        passed = signature.bind_partial(*op_args, **op_kwargs).arguments
    except (TypeError, ValueError):
        # It is no function, or the arguments do not fit, which has its own error.
        return
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            is_context = name == "context"
        else:
            is_context = name in KNOWN_CONTEXT_KEYS
        if is_context and name not in passed:
            raise InvalidJobError(
                f"the parameter {str(parameter).partition(':')[0].partition('=')[0]} is named like a variable of "
                "Airflow's context, which ranks do not have: pass the value that the training needs, such as "
                'ds="{{ ds }}", or rename the parameter'
            )


class _OfGroup(PlainXComArg):
    """The output of a task in a mapped task group for a task outside of it: a list by map index.

    Airflow itself gives the value of a single instance, None for no instance, and a list without skipped instances.
    """

    def resolve(self, context: Mapping[str, Any]) -> Any:
        """Returns the list; None stands for an instance without a value, which the log names."""
        ti, task_id = context["ti"], self.operator.task_id
        states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id]).get(ti.run_id, {})
        # The key of an instance has its map index at the end; a group without instances has one key without.
        count = sum(key != task_id and state != "removed" for key, state in states.items())
        values: list[Any] = ti.xcom_pull(task_ids=task_id, key=self.key, map_indexes=range(count))
        if missing := [str(index) for index, value in enumerate(values) if value is None]:
            logger.info("%s has no value of map index %s: None stands for each", task_id, ", ".join(missing))
        return values


def by_map_index(value: Any, group: Any) -> Any:
    """Returns an argument in which outputs of mapped task groups, but not of the task's own group, are `_OfGroup`."""
    if type(value) is PlainXComArg:
        of_value = value.operator.get_closest_mapped_task_group()
        return value if of_value in (None, group) else _OfGroup(value.operator, value.key)
    if isinstance(value, XComArg):
        # Those of `.map()`, `.zip()` and `.concat()`.
        inner = {name: by_map_index(getattr(value, name), group) for name in ("arg", "args") if hasattr(value, name)}
        return attrs.evolve(value, **inner) if inner else value  # type: ignore[misc]
    if type(value) in (list, tuple):
        return type(value)(by_map_index(each, group) for each in value)
    if type(value) is dict:
        return {name: by_map_index(each, group) for name, each in value.items()}
    return value


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

    Airflow's sequences become lists, its mappings dicts, and an ``ObjectStoragePath`` the text of its path or URL.
    Raises InvalidJobError, with the expression ``name``, for others, and for an undefined variable of a template.
    """
    of_airflow = type(value).__module__.partition(".")[0] == "airflow"
    if type(value) is tuple:
        return tuple(plain(item, f"{name}[{number}]") for number, item in enumerate(value))
    if type(value) is list or (of_airflow and isinstance(value, Sequence)):
        return [plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is dict or (of_airflow and isinstance(value, Mapping)):
        return {key: plain(value[key], f"{name}[{key!r}]") for key in value}
    if isinstance(value, ObjectStoragePath):
        # Without the connection, which no rank can look up.
        return value.path if value.protocol in ("", "file") else f"{value.protocol}://{value.path}"
    if of_airflow:
        raise InvalidJobError(
            f"{name} is a {type(value).__qualname__} of Airflow, which ranks cannot import: give the plain values in "
            "it that the training needs"
        )
    if type(value).__module__ == "jinja2.runtime" and hasattr(value, "_undefined_message"):
        raise InvalidJobError(f"{name} is a template whose variable is not defined: {value._undefined_message}")
    return value
