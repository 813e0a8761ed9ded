"""Values on their way between Airflow and ranks: the arguments of a training, its XCom, and its asset events.

Arguments may be templates and XComs; `check_early` refuses mistakes when a DAG file is parsed, before these are known.

The XCom is a plain value, if Airflow returns it unchanged, or a `ResultRef`.

Airflow stores what a task pulls a second time, as the rendered arguments of that task, and fails the task if it cannot:
so a ``nan`` cannot be hidden from Airflow in an object that only XCom's serialization replaces.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from airflow.sdk import ObjectStoragePath, XComArg

from airflow_rankzero import tries
from airflow_rankzero._compat import KNOWN_CONTEXT_KEYS, AirflowFailException, PlainXComArg, conf
from airflow_rankzero.links import DIRECTORY_KEY
from airflow_rankzero.listeners import offer
from rankzero import Launcher
from rankzero.errors import InvalidJobError
from rankzero.pipeline import attempt, check_callable, plain, reports, step_options

if TYPE_CHECKING:
    from airflow.sdk import Context

    from rankzero import ResultRef, RunHandle

logger = logging.getLogger(__name__)

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

TEMPLATED = ("op_args", "op_kwargs", "conn_id", "master", "spark_conf", *(n for n in OPTIONS if OPTIONS[n].late))
"""Arguments that may be templates or XComs, and ``train`` unless it is a function."""

_FIXED = ("retry_user_errors", "deferrable", "log_ranks", "skip_on_exit_code")

_OWN_KEYS = {DIRECTORY_KEY: "run directory", "return_value": "whole value"}

# Airflow's client writes a key into the path of a URL without quoting it; its server has two routes below a key.
_CHANGED_KEY = re.compile(r"[#?\x00-\x1f\x7f]|%[0-9a-fA-F]{2}|(^|/)\.\.?(/|$)|/slice$|/item/[^/]+$")


def value_of(handle: RunHandle[Any], task: Any, ti: Any) -> Any:
    """Returns rank 0's value as it becomes the task's XCom: plain if it is small JSON, else its `ResultRef`.

    A value whose keys or items other tasks depend on by ``multiple_outputs`` or ``expand`` is plain up to
    16 MiB.

    Raises:
        rankzero.RankZeroError: the run did not succeed; the type says why.
        AirflowFailException: Airflow would refuse the value at every try.
    """
    ref, status = handle.result_ref(), handle.status()
    uses = _uses(task, ti)
    if uses:
        return _taken_apart(ref, status.value, uses)
    small = status.value or [ref.summary[name] for name in ("value",) if name in ref.summary]
    return small[0] if small and not plain.find_unstorable(small[0]) else ref


_BY_KEYS, _BY_ITEMS = "multiple_outputs=True pushes its keys", "a task is mapped over it (expand)"


def _uses(task: Any, ti: Any) -> list[str]:
    """Returns the reasons for which Airflow takes the value of this task instance apart."""
    if not task.do_xcom_push:
        return []
    # The results of an expanded task are mapped over as the list that they make.
    is_one = ti.map_index is None or ti.map_index < 0
    is_mapped_over = is_one and task.has_dag() and next(task.iter_mapped_dependants(), None) is not None
    return [_BY_KEYS] * bool(task.multiple_outputs) + [_BY_ITEMS] * is_mapped_over


def _taken_apart(ref: ResultRef, inline: list[Any], uses: list[str]) -> Any:
    try:
        pushed = inline[0] if inline else _loaded(ref)
    except ValueError as error:
        raise _refusal(ref, uses, str(error)) from error
    most = conf.getint("core", "max_map_length", fallback=1024)
    why = plain.find_unstorable(pushed)
    if _BY_KEYS in uses:
        why = (find_lost_key(pushed) or why) if isinstance(pushed, dict) else "it is no dict"
    if _BY_ITEMS in uses and not isinstance(pushed, (list, dict)):
        why = "it is neither a list nor a dict"
    elif _BY_ITEMS in uses and len(pushed) > most:
        why = f"it has {len(pushed)} items, and [core] max_map_length is {most}"
    if why:
        raise _refusal(ref, uses, why)
    return pushed


def find_lost_key(keys: Iterable[str]) -> str | None:
    """Returns a description of the first key whose value Airflow would not store as an XCom of that key, or None."""
    for key in keys:
        if key in _OWN_KEYS:
            return f"its key {key!r} is the XCom of the {_OWN_KEYS[key]}"
        # The column of keys in Airflow's database has 512 characters.
        if not 0 < len(key) <= 512 or _CHANGED_KEY.search(key):
            return f"its key {key!r:.80} cannot be the key of an XCom: Airflow would change or reject it"
    return None


def _loaded(ref: ResultRef) -> Any:
    if "value" in ref.summary:
        return ref.summary["value"]
    if ref.size > plain.VALUE_LIMIT:
        raise ValueError(f"it has {ref.size} bytes, and an XCom may have {plain.VALUE_LIMIT}")
    return plain.plain_view(ref.load(), plain.VALUE_LIMIT)


def _refusal(ref: ResultRef, uses: list[str], why: str) -> AirflowFailException:
    return AirflowFailException(
        f"the training has succeeded, but its value cannot be taken apart, and {' and '.join(uses)}: {why}. Return a "
        f"small dict or list of plain values, or load the result in a task in between. It is stored in {ref.uri}"
    )


def record(task: Any, context: Context, handle: RunHandle[Any]) -> str | None:
    """Records a run whose value goes to Airflow next, and returns its address, or None. No failure fails the task."""
    log = task.log
    facts: dict[str, Any] = attempt(log, "the description of the result", lambda: describe(handle), {})
    if facts:
        attempt(log, "the extra of the asset events", lambda: fill_outlets(context, facts), None)
    attempt(log, "the description of the result", lambda: tries.show(log, "Result", facts), None)
    attempt(log, "the note of the delivery", lambda: offer(handle, tries.TaskTry(context["ti"])), None)
    return facts.get("uri")


def describe(handle: RunHandle[Any]) -> dict[str, Any]:
    """Returns the facts that an asset event records about the result, with the throughput of the run's reports."""
    ref, status = handle.result_ref(), handle.status()
    algorithm, _, digits = ref.digest.rpartition(":")
    facts = {
        "uri": ref.uri,
        "format": ref.format,
        "size": ref.size,
        algorithm: digits,
        "world_size": handle.world_size,
        "run_directory": handle.directory,
        "run_id": handle.id,
        "metrics": status.metrics,
        **reports.throughput(reports.rows_of(handle.events())),
    }
    # Airflow's API server refuses nan, for example, and with it the task's success.
    return dict(plain.storable(facts))


def fill_outlets(context: Context, facts: dict[str, Any]) -> None:
    """Adds the facts to the events of the task's assets; what the user's own code wrote there stays."""
    from airflow.sdk import Asset

    for outlet in context["outlets"]:
        if isinstance(outlet, Asset):
            event = context["outlet_events"][outlet]
            event.extra = {**facts, **(event.extra or {})}


# -- the arguments of ranks ---------------------------------------------------------------------


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
    """Returns an XCom in which outputs of mapped task groups, but not of the task's own group, are `_OfGroup`."""
    if type(value) is PlainXComArg:
        of_value = value.operator.get_closest_mapped_task_group()
        return value if of_value in (None, group) else _OfGroup(value.operator, value.key)
    if isinstance(value, XComArg):
        # Those of `.map()`, `.zip()` and `.concat()`.
        inner = {name: by_map_index(getattr(value, name), group) for name in ("arg", "args") if hasattr(value, name)}
        return attrs.evolve(value, **inner) if inner else value  # type: ignore[misc]
    return tuple(by_map_index(each, group) for each in value) if type(value) is tuple else value


def check_early(task: Any) -> None:
    """Raises InvalidJobError for obvious mistakes in a DAG file; templates and XComs are not known yet, and pass."""
    given = {name: getattr(task, name) for name in (*OPTIONS, *_FIXED)}
    late = {name for name, value in given.items() if is_late(value)}
    if fixed := sorted(late.difference(TEMPLATED)):
        raise InvalidJobError(
            f"{fixed[0]} is {given[fixed[0]]!r}, but cannot be a template or an XCom; "
            f"these can: train, {', '.join(TEMPLATED)}"
        )
    if not is_late(task.op_args):
        positional(task.op_args)
    if not is_late(task.op_kwargs):
        keyword(task.op_kwargs)
    is_program = isinstance(task.script, (str, os.PathLike, list, tuple)) or is_late(task.script)
    if not is_program and isinstance(task.op_args, (list, tuple)) and isinstance(task.op_kwargs, Mapping):
        # Names are known before the values. A subclass may add arguments when the task runs.
        check_callable(task.train, tuple(task.op_args), dict(task.op_kwargs), are_all=False)
        check_context(task.train, task.op_args, task.op_kwargs)
    if task.conn_id is not None and task.master is not None:
        raise InvalidJobError(
            f"conn_id is {task.conn_id!r}, and master is given: a connection names its master, so give one of the two "
            "(conn_id=None where default_args hold one)"
        )
    # The variables of the process that reads the DAG file may differ from the worker's; the others need heavy imports.
    known = {name: convert(name, given[name]) for name in set(OPTIONS) - late - {"env", "dataset", "trackers"}}
    # The connection decides about GPUs later, and with GPUs every backend is valid.
    values = {name: value for name, value in known.items() if value is not None or OPTIONS[name].default is not None}
    values.setdefault("use_gpu", True)
    values.setdefault("num_processes", values.get("processes_per_task", 1))
    Launcher(**values)


def convert(name: str, value: Any) -> Any:
    """Returns a rendered text as the number that it stands for, and everything else unchanged.

    ``""`` and ``"None"`` are None where the argument may be None. Raises InvalidJobError if the text is no number.

    Example:
        >>> convert("num_processes", "2:8"), convert("timeout", "None"), convert("store", "4")
        ((2, 8), None, '4')
    """
    option = OPTIONS[name]
    if not isinstance(value, str) or not option.is_number:
        return value
    return None if option.default is None and value.strip() in ("", "None") else option.kind.read(option.name, value)


def is_late(value: Any) -> bool:
    """Returns True for a value that is resolved at run time: a template, an XCom, a mapped task group's argument."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(is_late, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return hasattr(value, "resolve") and not isinstance(value, os.PathLike)


def check_context(function: Any, op_args: Any, op_kwargs: Any) -> None:
    """Raises InvalidJobError for a parameter that is named like a variable of Airflow's context and is not passed."""
    try:
        signature = inspect.signature(function)
        passed = signature.bind_partial(*op_args, **op_kwargs).arguments
    except (TypeError, ValueError):
        # The arguments do not fit, which has its own error, or it has no signature.
        return
    for name, parameter in signature.parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name not in passed and name in ({"context"} if is_variadic else KNOWN_CONTEXT_KEYS):
            raise InvalidJobError(
                f"the parameter {str(parameter).partition(':')[0].partition('=')[0]} is named like a variable of "
                "Airflow's context, which ranks do not have: pass the value that the training needs, such as "
                'ds="{{ ds }}", or rename the parameter'
            )


def positional(op_args: Any) -> tuple[Any, ...]:
    """Returns ``op_args`` for the ranks. Raises InvalidJobError if it is no list, or as `as_plain`."""
    if isinstance(op_args, (str, bytes, Mapping)) or not isinstance(op_args, Iterable):
        raise InvalidJobError(f"op_args is {op_args!r}; it must be a list of arguments")
    return tuple(as_plain(list(op_args), "op_args"))


def keyword(op_kwargs: Any) -> dict[str, Any]:
    """Returns ``op_kwargs`` for the ranks. Raises InvalidJobError if it is no mapping, or as `as_plain`."""
    if not isinstance(op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {op_kwargs!r}; it must map names to arguments")
    return dict(as_plain(dict(op_kwargs), "op_kwargs"))


def as_plain(value: Any, name: str) -> Any:
    """Returns an argument, also inside lists, tuples and dicts, with objects of Airflow as plain ones.

    Airflow's sequences become lists, its mappings dicts, and an ``ObjectStoragePath`` the text of its path or URL.
    Raises InvalidJobError, with the expression ``name``, for others, and for an undefined variable of a template.
    """
    of_airflow = type(value).__module__.partition(".")[0] == "airflow"
    if type(value) is tuple:
        return tuple(as_plain(item, f"{name}[{number}]") for number, item in enumerate(value))
    if type(value) is list or (of_airflow and isinstance(value, Sequence)):
        return [as_plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is dict or (of_airflow and isinstance(value, Mapping)):
        return {key: as_plain(value[key], f"{name}[{key!r}]") for key in value}
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
