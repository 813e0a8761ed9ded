"""`TaskTry`: one try of a task instance, and what it knows of Airflow for the run of its training.

What an existing run means is core's to decide (`rankzero.submit.durable`); a try answers its questions: will another
try come, was this a user's doing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_rankzero import _compat
from airflow_rankzero._compat import AirflowRescheduleException, TaskDeferred, conf
from rankzero.pipeline import lease as leases

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

logger = logging.getLogger(__name__)

MAX_RETRY_DELAY = timedelta(hours=24)
"""Airflow's own bound of a delay that grows."""

_HEARTBEAT_TIMEOUT = 300

_STATES_OF_USERS = ("failed", "success", "skipped", "upstream_failed", "removed", "restarting", None)


@dataclass(frozen=True)
class TaskTry:
    """One try of a task instance.

    Attributes:
        ti: The task instance, as Airflow gives it to the operator.
    """

    ti: Any

    @property
    def receiver(self) -> dict[str, Any]:
        """Names this try, for people: Airflow's listener acknowledges what it got."""
        return {"task_instance": str(getattr(self.ti, "id", "")), "try": self.ti.try_number}

    @property
    def is_followed_by_another(self) -> bool:
        """Returns True where a worker runs the task: a drained one costs no try, so even the last try may come back.

        In ``airflow tasks test`` and the like the run ends with the process, unless it is deferred.
        """
        return not self.is_in_process or bool(getattr(self.ti.task, "deferrable", False))

    @property
    def is_in_process(self) -> bool:
        """Returns True if this process belongs to a person or a script, and not to a worker."""
        return _compat.is_in_process()

    @property
    def lease_when_attached(self) -> float | None:
        """None: as the submission says."""
        return None

    @property
    def retrier(self) -> None:
        """None: Airflow's scheduler starts every try, and it is a service that is restarted."""

    @property
    def generation(self) -> str:
        """Names the tries that Airflow starts by itself: a clear raises ``max_tries``, a retry does not."""
        return f"{self.ti.run_id}#{self.ti.max_tries}"

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """False: Airflow's listener has acknowledged by now what Airflow has (`airflow_rankzero.delivery`)."""
        return False

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """False: a task instance that has succeeded begins again only if a user wants that."""
        return False

    def detaches(self, error: BaseException) -> bool:
        """True if the training goes on, for a try that Airflow starts by itself."""
        if isinstance(error, (TaskDeferred, AirflowRescheduleException)):
            return True
        # A timeout or an interrupt ends it, and so does a failure that no try comes after.
        return isinstance(error, Exception) and self.is_retried

    @property
    def is_retried(self) -> bool:
        """True if Airflow will try this task instance again when this try fails."""
        return bool(self.ti.try_number <= self.ti.max_tries)

    def was_ended_by_user(self) -> bool:
        """True if a user has marked or cleared the task instance.

        Else a process that was asked to exit does so with its worker; or Airflow has lost sight of it for a while,
        counts it as dead, and has a retry on its way. Not to be called in a signal handler: it talks to the
        supervisor, which the handler may have interrupted.
        """
        try:
            return state_of(self.ti, self.ti.get_task_states) in _STATES_OF_USERS
        except Exception:
            # A whole deployment goes down: the run's lease ends it if nobody comes back.
            logger.warning("cannot ask Airflow whether this task was ended by a user", exc_info=True)
            return False


def lease(task: BaseOperator, ti: Any, *, deferred: bool) -> float:
    """Seconds for which a run may go on without a follower.

    Long enough for a try that was killed together with its supervisor to be noticed, and for the next one to begin.
    """
    least = leases.DETACHED_LEASE if deferred else leases.SCHEDULING_SLACK
    if not TaskTry(ti).is_retried:
        return least
    unnoticed = conf.getint("scheduler", "task_instance_heartbeat_timeout", fallback=_HEARTBEAT_TIMEOUT)
    return leases.lease(_longest_delay(task, ti.max_tries), unnoticed=unnoticed, least=least)


def _longest_delay(task: BaseOperator, tries: int) -> float:
    """Of the task itself, or of a rule of its retry policy."""
    rules = getattr(getattr(task, "retry_policy", None), "rules", ())
    delays = [rule.retry_delay.total_seconds() for rule in rules if rule.retry_delay is not None]
    return float(max(_own_delay(task, tries), *delays, 0.0))


def _own_delay(task: BaseOperator, tries: int) -> float:
    delay = task.retry_delay.total_seconds()
    growth: float | bool | None = task.retry_exponential_backoff
    # Airflow 3.1 has a flag here, which doubles the delay.
    factor = 2.0 if growth is True else float(growth or 1.0)
    if factor <= 1.0:
        return delay
    bound = task.max_retry_delay or MAX_RETRY_DELAY
    longest = bound.total_seconds() if isinstance(bound, timedelta) else float(bound)
    # Airflow adds up to as much again, by chance.
    return min(longest, leases.longest_delay(delay, 2 * leases.power(factor, max(0, tries - 1)), longest))


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
