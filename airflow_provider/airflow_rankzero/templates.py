"""Template fields of the operator: which they are, and what their rendered text becomes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from airflow.sdk import ObjectStoragePath

from airflow_rankzero.paths import check_store
from rankzero import Launcher
from rankzero.errors import InvalidJobError
from rankzero.pipeline import AUTO

TEMPLATE_FIELDS = (
    "train",
    "op_args",
    "op_kwargs",
    "num_processes",
    "processes_per_task",
    "conn_id",
    "master",
    "spark_conf",
    "env",
    "store",
    "timeout",
    "start_timeout",
    "hang_timeout",
    "max_restarts",
    "restart_on",
    "working_dir",
    "py_files",
    "excludes",
    "dataset",
)
"""What may be a template, or an XCom. ``train`` only while it is a string: Airflow calls what can be called."""

LAUNCHER_FIELDS = (
    "num_processes",
    "processes_per_task",
    "cpus_per_process",
    "use_gpu",
    "backend",
    "timeout",
    "start_timeout",
    "hang_timeout",
    "max_restarts",
    "restart_on",
    "max_preemptions",
    "checkpoints",
    "ports",
    "stop_grace",
    "exit_timeout",
    "orphan_timeout",
    "warm_start",
    "encrypt",
)
"""Arguments of the operator that `rankzero.Launcher` checks. Texts are not among them: they may hold templates."""

_WHOLE_NUMBERS = ("num_processes", "processes_per_task", "max_restarts")
_SECONDS = ("timeout", "start_timeout", "hang_timeout")
_OPTIONAL = ("processes_per_task", "timeout", "hang_timeout")
# None says here that the connection, or a default, decides.
_DECIDED_ELSEWHERE = ("processes_per_task", "use_gpu", "checkpoints")


def fields_to_render(task: Any, names: Iterable[str]) -> list[str]:
    """The template fields that may be templates: ``train`` and ``restart_on`` may be functions, and others paths."""
    return [name for name in names if _may_be_template(name, getattr(task, name))]


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
    if not isinstance(value, str) or name not in _WHOLE_NUMBERS + _SECONDS:
        return value
    if name in _OPTIONAL and value.strip() in ("", "None"):
        return None
    if name == "num_processes" and value.strip() == AUTO:
        return AUTO
    if name == "num_processes" and ":" in value:
        return tuple(convert(name, bound) for bound in value.split(":"))
    try:
        return int(value)
    except ValueError:
        if name in _WHOLE_NUMBERS:
            raise InvalidJobError(f"{name} is {value!r}; it must be a whole number, or render to one") from None
    try:
        return float(value)
    except ValueError:
        raise InvalidJobError(f"{name} is {value!r}; it must be a number of seconds, or render to one") from None


def check_early(task: Any) -> None:
    """Refuses obvious mistakes when a DAG file is parsed; what is not known yet (templates, XComs) is let through.

    Args:
        task: The operator, with its arguments as attributes.

    Raises:
        InvalidJobError: says which value, and what to do.
    """
    given = {name: getattr(task, name) for name in LAUNCHER_FIELDS}
    late = {name for name, value in given.items() if _is_late(value)}
    if fixed := sorted(late.difference(TEMPLATE_FIELDS)):
        raise InvalidJobError(
            f"{fixed[0]} is {given[fixed[0]]!r}, but cannot be a template or an XCom; "
            f"these can: {', '.join(TEMPLATE_FIELDS)}"
        )
    if not (callable(task.train) or isinstance(task.train, (str, os.PathLike, list, tuple)) or _is_late(task.train)):
        raise InvalidJobError(
            f"train is {task.train!r}; give a function, 'path/to/script.py', 'package.module:function', "
            "'-m package.module' or a list of words that are a command"
        )
    if task.conn_id is not None and task.master is not None:
        raise InvalidJobError(
            f"conn_id is {task.conn_id!r} and master is {task.master!r}: a connection names its master, so give one of "
            "the two (conn_id=None where default_args hold one)"
        )
    if task.store and not _is_late(task.store):
        check_store(task.store)
    _check_known({name: convert(name, value) for name, value in given.items() if name not in late})


def _is_late(value: Any) -> bool:
    """Returns True for a value that is resolved at run time: a template, an XCom, a mapped task group's argument."""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return hasattr(value, "resolve") and not isinstance(value, os.PathLike)


def _check_known(known: Mapping[str, Any]) -> None:
    values = {name: value for name, value in known.items() if value is not None or name not in _DECIDED_ELSEWHERE}
    # The connection decides about GPUs later, and with GPUs every backend is valid.
    values.setdefault("use_gpu", True)
    if "num_processes" not in values:
        values["num_processes"] = values.get("processes_per_task", 1)
    Launcher(**values)
