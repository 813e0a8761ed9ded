"""What Airflow stores about a training that has succeeded: its XCom, and the extra of its assets' events.

The XCom is a plain value, if Airflow returns it unchanged, or a `ResultRef`.

Airflow stores what a task pulls a second time, as the rendered arguments of that task, and fails the task if it cannot:
so a ``nan`` cannot be hidden from Airflow in an object that only XCom's serialization replaces.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_rankzero import tries
from airflow_rankzero._compat import AirflowFailException, conf, extra_of_alias
from airflow_rankzero.links import DIRECTORY_KEY
from airflow_rankzero.listeners import offer
from rankzero.pipeline import VALUE_LIMIT, attempt, find_unstorable, plain_view, reports, split, storable

if TYPE_CHECKING:
    from airflow.sdk import Context

    from rankzero import ResultRef, RunHandle

logger = logging.getLogger(__name__)

REPORT_LINES = 20
"""Reports in the log's table, evenly chosen."""

_OWN_KEYS = {DIRECTORY_KEY: "run directory", "return_value": "whole value"}

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
    most = conf.getint("core", "max_map_length", fallback=1024)
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
    if ref.size > VALUE_LIMIT:
        raise ValueError(f"it has {ref.size} bytes, and an XCom may have {VALUE_LIMIT}")
    return plain_view(ref.load(), VALUE_LIMIT)


def _refusal(ref: ResultRef, uses: list[str], why: str) -> AirflowFailException:
    return AirflowFailException(
        f"the training has succeeded, but its value cannot be taken apart, and {' and '.join(uses)}: {why}. Return a "
        f"small dict or list of plain values, or load the result in a task in between. It is stored in {ref.uri}"
    )


def record(task: Any, context: Context, handle: RunHandle[Any]) -> str | None:
    """Records a run whose value goes to Airflow next, and returns its address, or None. No failure fails the task."""
    log = task.log
    rows: list[dict[str, Any]] = attempt(log, "the table of reports", lambda: reports.rows_of(handle.events()), [])
    facts: dict[str, Any] = attempt(log, "the description of the result", lambda: describe(handle, rows), {})
    if facts:
        attempt(log, "the extra of the asset events", lambda: fill_outlets(context, facts), None)
    attempt(log, "the table of reports", lambda: show_reports(log, rows), None)
    attempt(log, "the description of the result", lambda: tries.show(log, "Result", facts), None)
    attempt(log, "the note of the delivery", lambda: offer(handle, tries.TaskTry(context["ti"])), None)
    return facts.get("uri")


def show_reports(log: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a group with the losses' curves and a table of rank 0's reports; none if there were no reports."""
    if not rows:
        return
    from rankzero.pipeline import curves

    log.info("::group::Reports of rank 0")
    for name in curves.loss_names(rows):
        if drawn := curves.text(rows, name):
            log.info("%s: %s", name, drawn)
    for line in curves.table(curves.evenly(rows, REPORT_LINES)):
        log.info("%s", line)
    log.info("::endgroup::")


def describe(handle: RunHandle[Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts that an asset event records about the result, with the throughput of its reports' ``rows``."""
    ref, status = handle.result_ref(), handle.status()
    facts = {
        "uri": ref.uri,
        "format": ref.format,
        "size": ref.size,
        # Under the name of its algorithm.
        **dict([split(ref.digest)]),
        "world_size": handle.world_size,
        "run_directory": handle.directory,
        "run_id": handle.id,
        "metrics": status.metrics,
        **reports.throughput(rows),
    }
    # Airflow's API server refuses nan, for example, and with it the task's success.
    return dict(storable(facts))


def fill_outlets(context: Context, facts: dict[str, Any]) -> None:
    """Adds the facts to the events of the task's assets; what the user's own code wrote there stays.

    An alias gets an event of an asset that is the result itself, unless the user's code (``pre_execute``) has given it
    one: then that one gets the facts.
    """
    from airflow.sdk import Asset, AssetAlias

    for outlet in context["outlets"]:
        if isinstance(outlet, Asset):
            events: list[Any] = [context["outlet_events"][outlet]]
            extra = facts
        elif isinstance(outlet, AssetAlias):
            events = _events_of(context["outlet_events"][outlet], facts["uri"])
            extra = extra_of_alias(facts)
        else:
            continue
        for event in events:
            event.extra = {**extra, **(event.extra or {})}


def _events_of(alias: Any, uri: str) -> list[Any]:
    from airflow.sdk import Asset

    if not alias.asset_alias_events:
        try:
            alias.add(Asset(uri))
        except ValueError as error:
            # Airflow bounds length and characters; the training has succeeded.
            logger.warning("%s cannot be an asset of the alias %r: %s", uri, alias.key.name, error)
    return list(alias.asset_alias_events)
