"""Template fields of the operator: which they are, and what their rendered text becomes."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from pathlib import PurePath
from typing import Any, TypeVar

from airflow.sdk import ObjectStoragePath

from airflow_rankzero.paths import check_store
from rankzero import Launcher
from rankzero.errors import InvalidJobError
from rankzero.pipeline import Option, check_callable, step_options

F = TypeVar("F", bound=Callable[..., None])

OPTIONS = step_options(
    late="Templated.",
    num_processes={"default": 2},
    processes_per_task={"default": None, "more": "None: the connection's value, else 1."},
    use_gpu={"default": None, "more": "None: the connection's value."},
    store={"more": "The connection's value, and ``[rankzero] store`` of Airflow's configuration, come before these."},
    orphan_timeout={"help": "Seconds that a run continues without a follower; None: until the next try of the task."},
    checkpoints={"default": None, "more": "None: the newest two."},
)
"""The options of a run, by name, that are arguments of the operator; None as a default: the connection decides."""

TEMPLATE_FIELDS = (
    *("train", "op_args", "op_kwargs", "conn_id", "master", "spark_conf"),
    *(name for name, option in OPTIONS.items() if option.late),
)
"""What may be a template, or an XCom. ``train`` only while it is a string: Airflow calls what can be called."""

_FLAGS = ("retry_user_errors", "deferrable")
_NUMBERS = {"log_ranks": "a list of ranks, such as [0]", "skip_on_exit_code": "exit codes, such as 99 or [98, 99]"}
# Arguments of the operator that are no options of a run.


def annotation(option: Option) -> str:
    """Returns the type of an operator's argument: that of the option, or a text that is rendered to a number."""
    types = [kind for kind in option.type.split(" | ") if kind != "None"]
    late = ["str"] if option.is_number else []
    optional = ["None"] if option.default is None or "None" in option.type else []
    return " | ".join([*types, *late, *optional])


def takes_options(init: F) -> F:
    """Gives a constructor a signature with an argument for each option, by which Airflow finds default arguments."""
    signature = inspect.signature(init)
    *own, rest = signature.parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation(option))
        for name, option in OPTIONS.items()
    ]
    parameters = [*own, *added, rest.replace(annotation="Any")]
    init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return init


def fields_to_render(task: Any, names: Iterable[str]) -> list[str]:
    """The template fields that may be templates: ``train`` and ``restart_on`` may be functions, and others paths."""
    return [name for name in names if _may_be_template(name, getattr(task, name))]


def unsteady(task: Any, context: Any, jinja_env: Any) -> list[str]:
    """Returns the names of arguments whose templates render to another text each time, such as the current time."""
    positional = enumerate(task.op_args) if isinstance(task.op_args, (list, tuple)) else ()
    named = task.op_kwargs.items() if isinstance(task.op_kwargs, Mapping) else ()
    texts = {f"argument {name}": value for name, value in (*positional, *named) if _is_late(value, of_xcom=False)}
    renderings = ({name: task.render_template(texts[name], context, jinja_env) for name in texts} for _ in range(2))
    first, second = renderings
    return [name for name in texts if first[name] != second[name]]


def _may_be_template(name: str, value: Any) -> bool:
    if isinstance(value, PurePath) and not isinstance(value, ObjectStoragePath):
        # Airflow 3.1 takes a path's `resolve` for its own.
        return False
    return name not in ("train", "restart_on") or not callable(value)


def convert(name: str, value: Any) -> Any:
    """A rendered text as the number that it stands for; everything else as it is.

    Args:
        name: Of the argument.
        value: What was rendered. ``""`` and ``"None"`` are None where the argument may be None; ``"2:8"`` is the
            smallest and the largest number of processes, ``"auto"`` is what there is.

    Raises:
        InvalidJobError: the text is no number.

    Example:
        >>> convert("num_processes", "4"), convert("timeout", "None"), convert("store", "4")
        (4, None, '4')
        >>> convert("num_processes", "2:8")
        (2, 8)
    """
    option = OPTIONS.get(name)
    if not isinstance(value, str) or option is None or not option.is_number:
        return value
    if option.default is None and value.strip() in ("", "None"):
        return None
    try:
        return option.read(value)
    except InvalidJobError as error:
        raise InvalidJobError(f"{error}, or render to one") from None


def check_early(task: Any) -> None:
    """Refuses obvious mistakes when a DAG file is parsed; what is not known yet (templates, XComs) is let through.

    Args:
        task: The operator, with its arguments as attributes.

    Raises:
        InvalidJobError: says which value, and what to do.
    """
    given = {name: getattr(task, name) for name in OPTIONS}
    late = {name for name, value in given.items() if _is_late(value)}
    own = {name: getattr(task, name) for name in (*_FLAGS, *_NUMBERS)}
    if fixed := sorted(late.union(name for name in own if _is_late(own[name])).difference(TEMPLATE_FIELDS)):
        raise InvalidJobError(
            f"{fixed[0]} is {getattr(task, fixed[0])!r}, but cannot be a template or an XCom; "
            f"these can: {', '.join(TEMPLATE_FIELDS)}"
        )
    if not (callable(task.train) or isinstance(task.train, (str, os.PathLike, list, tuple)) or _is_late(task.train)):
        raise InvalidJobError(
            f"train is {task.train!r}; give a function, 'path/to/script.py', 'package.module:function', "
            "'-m package.module' or a list of words that are a command"
        )
    if not _is_late(task.op_args) and (
        isinstance(task.op_args, (str, bytes)) or not isinstance(task.op_args, Iterable)
    ):
        raise InvalidJobError(f"op_args is {task.op_args!r}; it must be a list of arguments")
    if not _is_late(task.op_kwargs) and not isinstance(task.op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {task.op_kwargs!r}; it must map names to arguments")
    if callable(task.train) and isinstance(task.op_args, (list, tuple)) and isinstance(task.op_kwargs, Mapping):
        # Names are known before the values. A subclass may add arguments when the task runs.
        check_callable(task.train, tuple(task.op_args), dict(task.op_kwargs), are_all=False)
    for name in _FLAGS:
        if not isinstance(own[name], bool):
            raise InvalidJobError(f"{name} is {own[name]!r}; give True or False")
    for name, wanted in _NUMBERS.items():
        if own[name] is not None and not _are_whole_numbers(own[name]):
            raise InvalidJobError(f"{name} is {own[name]!r}; give {wanted}")
    if task.conn_id is not None and task.master is not None:
        raise InvalidJobError(
            f"conn_id is {task.conn_id!r}, and master is given: a connection names its master, so give one of the two "
            "(conn_id=None where default_args hold one)"
        )
    # The variables of the process that reads the DAG file may differ from the worker's; the others need heavy imports.
    known = {name: convert(name, given[name]) for name in set(given) - late - {"env", "dataset", "trackers"}}
    # The connection decides about GPUs later, and with GPUs every backend is valid.
    values = {name: value for name, value in known.items() if value is not None or OPTIONS[name].default is not None}
    values.setdefault("use_gpu", True)
    if "num_processes" not in values:
        values["num_processes"] = values.get("processes_per_task", 1)
    Launcher(**values)
    if values.get("store"):
        check_store(values["store"])


def as_list(numbers: Any) -> list[int] | None:
    """Returns whole numbers, also those of numpy, as a list of ``int``; None unchanged."""
    return None if numbers is None else [operator.index(number) for number in numbers]


def _are_whole_numbers(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(each, Integral) and not isinstance(each, bool) for each in value)


def _is_late(value: Any, of_xcom: bool = True) -> bool:
    """Returns True for a value that is resolved at run time: a template, an XCom, a mapped task group's argument."""
    if isinstance(value, (list, tuple, dict)):
        return any(_is_late(each, of_xcom) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return of_xcom and hasattr(value, "resolve") and not isinstance(value, os.PathLike)
