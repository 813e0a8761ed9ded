"""What Airflow records about a training that has succeeded: events of its assets, its log, the delivery."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow_rankzero import log_groups
from airflow_rankzero._compat import extra_of_alias
from airflow_rankzero.delivery import offer
from airflow_rankzero.tries import TaskTry
from rankzero.pipeline import attempt, reports, split, storable

if TYPE_CHECKING:
    from airflow.sdk import Context

    from rankzero import RunHandle

logger = logging.getLogger(__name__)


def record(task: Any, context: Context, handle: RunHandle[Any]) -> str | None:
    """Records a run whose value goes to Airflow next, and returns its address, or None. No failure fails the task."""
    log = task.log
    rows: list[dict[str, Any]] = attempt(log, "the table of reports", lambda: reports.rows_of(handle.events()), [])
    facts: dict[str, Any] = attempt(log, "the description of the result", lambda: describe(handle, rows), {})
    if facts:
        attempt(log, "the extra of the asset events", lambda: fill_outlets(context, facts), None)
    attempt(log, "the table of reports", lambda: log_groups.show_reports(log, rows), None)
    attempt(log, "the description of the result", lambda: log_groups.show(log, "Result", facts), None)
    attempt(log, "the note of the delivery", lambda: offer(handle, TaskTry(context["ti"])), None)
    return facts.get("uri")


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
