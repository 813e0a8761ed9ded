"""The value of a training as Airflow's XCom: a plain value, if Airflow returns it unchanged, or a `ResultRef`.

Airflow stores what a task pulls a second time, as the rendered arguments of that task, and fails the task if it cannot:
so a ``nan`` cannot be hidden from Airflow in an object that only XCom's serialization replaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from airflow_rankzero._compat import AirflowFailException, conf
from airflow_rankzero.links import DIRECTORY_KEY
from rankzero.pipeline import VALUE_LIMIT, find_unstorable, plain_view

if TYPE_CHECKING:
    from rankzero import ResultRef, RunHandle

_MAX_MAP_LENGTH = 1024
# Airflow's own default.

_OWN_KEYS = {DIRECTORY_KEY: "run directory", "return_value": "whole value"}

_MAX_KEY_LENGTH = 512
# The column of XCom keys in Airflow's database.

# Airflow's client writes a key into the path of a URL without quoting it; its server has two routes below a key.
_CHANGED_KEY = re.compile(r"[#?\x00-\x1f\x7f]|%[0-9a-fA-F]{2}|(^|/)\.\.?(/|$)|/slice$|/item/[^/]+$")


def value_of(handle: RunHandle[Any], task: Any, ti: Any) -> Any:
    """Returns rank 0's value as it becomes the task's XCom: plain if it is small JSON, else its `ResultRef`.

    A value whose keys or items other tasks depend on by ``multiple_outputs`` or ``expand`` is plain up to
    `VALUE_LIMIT` bytes.

    Raises:
        rankzero.RankZeroError: the run did not succeed; the type says why.
        AirflowFailException: Airflow would refuse the value at every try.
    """
    ref, status = handle.result_ref(), handle.status()
    uses = _uses(task, ti)
    if uses:
        return _taken_apart(ref, status.value, uses)
    plain = status.value or [ref.summary[name] for name in ("value",) if name in ref.summary]
    return plain[0] if plain and not find_unstorable(plain[0]) else ref


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
    most = conf.getint("core", "max_map_length", fallback=_MAX_MAP_LENGTH)
    why = find_unstorable(pushed)
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
    """Returns a description of the first key whose value Airflow would not store as an XCom of that key, or None.

    Example:
        >>> find_lost_key(["loss", "val/loss", "100%"]), find_lost_key(["loss#1"])
        (None, "its key 'loss#1' cannot be the key of an XCom: Airflow would change or reject it")
    """
    for key in keys:
        if key in _OWN_KEYS:
            return f"its key {key!r} is the XCom of the {_OWN_KEYS[key]}"
        if not 0 < len(key) <= _MAX_KEY_LENGTH or _CHANGED_KEY.search(key):
            return f"its key {key!r:.80} cannot be the key of an XCom: Airflow would change or reject it"
    return None


def _loaded(ref: ResultRef) -> Any:
    if "value" in ref.summary:
        return ref.summary["value"]
    if ref.size > VALUE_LIMIT:
        raise ValueError(f"it has {ref.size} bytes, and an XCom may have {VALUE_LIMIT}")
    return plain_view(ref.load(), VALUE_LIMIT)


def _refusal(ref: ResultRef, uses: list[str], why: str) -> AirflowFailException:
    return AirflowFailException(
        f"the training has succeeded, but its value cannot be taken apart, and {' and '.join(uses)}: {why}. Return a "
        f"small dict or list of plain values, or load the result in a task in between. It is stored in {ref.uri}"
    )
