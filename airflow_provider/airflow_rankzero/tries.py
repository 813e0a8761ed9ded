"""`TaskTry`: one try of a task instance, which answers core's questions about Airflow.

Core (`rankzero.submit.durable`) decides what a try does with an existing run, and queries the try: whether another try
follows, whether a user has ended the task.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_rankzero import _compat
from airflow_rankzero._compat import AirflowRescheduleException, TaskDeferred, conf
from rankzero.pipeline import lease as leases

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

    from rankzero import RunHandle

logger = logging.getLogger(__name__)

MAX_RETRY_DELAY = timedelta(hours=24)
"""Airflow's own limit of an exponential delay."""

STEM_LIMIT = 180
"""Characters before the checksum; core allows 200 in all."""

_HEARTBEAT_TIMEOUT = 300

STATES_OF_USERS = ("failed", "success", "skipped", "upstream_failed", "removed", "restarting", None)
"""States of a task instance that a user has marked or cleared while its process was running."""


@dataclass(frozen=True)
class TaskTry:
    """A try of a task instance, with the facts about Airflow that core needs.

    Attributes:
        ti: The task instance that Airflow passes to the operator.
    """

    ti: Any

    @property
    def receiver(self) -> dict[str, Any]:
        """Identifies this try in the record of a delivery, which Airflow's listener acknowledges."""
        return {"task_instance": str(getattr(self.ti, "id", "")), "try": self.ti.try_number}

    def is_replaced(self, handle: RunHandle[Any]) -> bool:
        """Returns True if the run that this try follows was ended for an earlier try, which a user has cleared.

        The process that ends it may learn of the clear after this try has attached.
        """
        receiver = handle.cancelled_for() if handle.status().state == "cancelled" else {}
        return bool(receiver) and receiver != self.receiver

    @property
    def is_followed_by_another(self) -> bool:
        """Returns True where a worker runs the task: a drained one costs no try, so even the last try may come back.

        In ``airflow tasks test`` and the like the run ends with the process, unless it is deferred.
        """
        return not self.is_in_process or bool(getattr(self.ti.task, "deferrable", False))

    @property
    def is_in_process(self) -> bool:
        """Returns True if this process was started by a user or a script, and not by a worker."""
        return _compat.is_in_process()

    @property
    def lease_when_attached(self) -> float | None:
        """Returns None: attaching keeps the submission's lease."""
        return None

    @property
    def retrier(self) -> None:
        """Returns None: no process ends the retries, since Airflow's scheduler is a service that is restarted."""

    @property
    def generation(self) -> str:
        """Identifies the chain of automatic retries.

        A clear sets ``max_tries`` to the number of tries so far and the task's ``retries``; a retry leaves it. Without
        ``retries``, which may have been lowered before a clear, the number is that of the tries before the chain.
        (``retries`` that are lowered while a chain runs look like a clear. Raised ones do not in the first chain.) If
        the worker of a running task had died before the task was cleared, Airflow leaves ``max_tries`` and starts
        another try, even one beyond it. While retries are left, that try looks like an automatic one.
        """
        before = max(self.ti.max_tries, self.ti.try_number - 1) - (self.ti.task.retries or 0)
        return f"{self.ti.run_id}#{max(0, before)}"

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns False: Airflow's listener (`airflow_rankzero.delivery`) has already acknowledged a stored result."""
        return False

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns False: a task instance that has succeeded is only run again by a user."""
        return False

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the training continues after an error of this try, for an automatic retry."""
        if isinstance(error, (TaskDeferred, AirflowRescheduleException)):
            return True
        # A timeout or an interrupt ends it, and so does a failure without a further try.
        return isinstance(error, Exception) and self.is_retried

    @property
    def is_retried(self) -> bool:
        """Returns True if Airflow will retry this task instance when this try fails."""
        return bool(self.ti.try_number <= self.ti.max_tries)

    def state(self) -> str | None:
        """Returns the state that Airflow has of the task instance; ``"running"`` if it cannot be queried.

        If it is none of `STATES_OF_USERS`, a process was asked to exit because its worker shuts down, or because
        Airflow missed its heartbeats, counts it as dead, and schedules a retry. Must not be called in a signal handler:
        it sends a request to the supervisor, and the handler may have interrupted another request.
        """
        try:
            return state_of(self.ti, self.ti.get_task_states)
        except Exception:
            # The whole deployment may be stopping: the run's lease ends it if no process follows it again.
            logger.warning("cannot ask Airflow whether this task was ended by a user", exc_info=True)
            return "running"


def lease(task: BaseOperator, ti: Any, *, deferred: bool) -> float:
    """Returns the seconds that a run may continue without a follower.

    The lease is long enough for Airflow to notice that a try and its supervisor were killed, and to start the next one.
    """
    least = leases.DETACHED_LEASE if deferred else leases.SCHEDULING_SLACK
    if not TaskTry(ti).is_retried:
        return least
    unnoticed = conf.getint("scheduler", "task_instance_heartbeat_timeout", fallback=_HEARTBEAT_TIMEOUT)
    return leases.lease(_longest_delay(task, ti.max_tries), unnoticed=unnoticed, least=least)


def _longest_delay(task: BaseOperator, tries: int) -> float:
    """Returns the longest retry delay of the task or of a rule of its retry policy, in seconds."""
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
    """Queries the current state of a task instance; None after a clear, or if its DAG run was deleted.

    Args:
        ti: The task instance.
        ask: ``get_task_states`` of the process's own task instances.

    Raises:
        Exception: the request to Airflow failed.
    """
    mapped = {"map_index": ti.map_index} if ti.map_index is not None and ti.map_index >= 0 else {}
    states = ask(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], **mapped)
    # A mapped task's key has its index at the end.
    return next((None if state is None else str(state) for state in states.get(ti.run_id, {}).values()), None)


def run_id_of(dag_id: str, dag_run_id: str, task_id: str, map_index: int) -> str:
    """A name for the run of one task instance, the same in all its tries.

    Args:
        dag_id: Id of the DAG.
        dag_run_id: Id of the DAG run.
        task_id: Id of the task.
        map_index: Index of a mapped task, -1 for any other.

    Returns:
        ``dag__run__task[__map]-`` and a checksum of the four, since what cannot stand in the name of a directory is
        replaced there, and long names are cut.

    Example:
        >>> run_id_of("digits", "manual__2026-01-01T00:00:00+00:00", "train", -1)
        'digits__manual__2026-01-01T00-00-00+00-00__train-e2a272a94de9b56a'
    """
    parts = [dag_id, dag_run_id, task_id, *([str(map_index)] if map_index >= 0 else [])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "__".join(parts)).lstrip("._=+-") or "task"
    return f"{stem[:STEM_LIMIT]}-{digest[:16]}"
