"""What the tries of one task instance share: when another will come, how long to wait for it, whether this one ends.

A training belongs to its run directory. A try that dies leaves it running, the next try takes it up; a try that a
user ended, and the last one, take it along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

logger = logging.getLogger(__name__)

SCHEDULING_SLACK = 900.0
"""Seconds between the moment at which a try is due and its first look at the run: a pool may be full, a deployment
may take its time."""

DEFERRED_LEASE = 1800.0
"""Least lease of a deferred task, whose triggerer may be restarted."""

MAX_RETRY_DELAY = timedelta(hours=24)
"""Airflow's own bound of a delay that grows."""

_HEARTBEAT_TIMEOUT = 300

_USERS_WORDS = ("failed", "success", "skipped", "upstream_failed", "removed", "restarting", None)


def another_follows(ti: Any) -> bool:
    """True if Airflow will try this task instance again when this try fails."""
    return bool(ti.try_number <= ti.max_tries)


def generation(ti: Any) -> str:
    """The same for the tries that follow each other by themselves; another one after a clear.

    Airflow raises ``max_tries`` whenever a task that does not run is cleared, and only then.
    """
    return str(ti.max_tries)


def lease(task: BaseOperator, ti: Any, *, deferred: bool) -> float:
    """Seconds for which a run may go on without a follower.

    Long enough for a try that was killed together with its supervisor to be noticed, and for the next one to begin.
    """
    least = DEFERRED_LEASE if deferred else SCHEDULING_SLACK
    if not another_follows(ti):
        return least
    unnoticed = conf.getint("scheduler", "task_instance_heartbeat_timeout", fallback=_HEARTBEAT_TIMEOUT)
    return max(least, unnoticed + _longest_delay(task, ti.max_tries) + SCHEDULING_SLACK)


def _longest_delay(task: BaseOperator, tries: int) -> float:
    """Of the task itself, or of a rule of its retry policy."""
    rules = getattr(getattr(task, "retry_policy", None), "rules", ())
    delays = [rule.retry_delay.total_seconds() for rule in rules if rule.retry_delay is not None]
    return float(max(_own_delay(task, tries), *delays, 0.0))


def _own_delay(task: BaseOperator, tries: int) -> float:
    delay = task.retry_delay.total_seconds()
    factor = float(task.retry_exponential_backoff or 1.0)
    if factor <= 1.0:
        return delay
    bound = task.max_retry_delay or MAX_RETRY_DELAY
    longest = bound.total_seconds() if isinstance(bound, timedelta) else float(bound)
    try:
        # Airflow adds up to as much again, by chance.
        return min(longest, 2 * delay * factor ** max(0, tries - 1))
    except OverflowError:
        return longest


def was_ended_by_a_user(ti: Any) -> bool:
    """True if the state that Airflow has of this task instance is the word of a user, who marked or cleared it.

    Else a process that was told to go goes away with its worker; or Airflow has lost sight of it for a while, counts it
    as dead, and has a retry on its way. Not to be called in a signal handler: it talks to the supervisor, which the
    handler may have interrupted.
    """
    try:
        return state_of(ti, ti.get_task_states) in _USERS_WORDS
    except Exception:
        # A whole deployment goes down: the run's lease ends it if nobody comes back.
        logger.warning("cannot ask Airflow whether this task was ended by a user", exc_info=True)
        return False


def state_of(ti: Any, ask: Callable[..., dict[str, Any]]) -> str | None:
    """What Airflow says of a task instance now; None after a clear, and if its DAG run was deleted.

    Args:
        ti: The task instance.
        ask: ``get_task_states`` of the process's own task instances.

    Raises:
        Exception: Airflow cannot be asked.
    """
    mapped = {"map_index": ti.map_index} if ti.map_index is not None and ti.map_index >= 0 else {}
    states = ask(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], **mapped)
    # A mapped task's key has its index at the end.
    return next((None if state is None else str(state) for state in states.get(ti.run_id, {}).values()), None)
