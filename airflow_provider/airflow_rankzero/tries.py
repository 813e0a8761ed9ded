"""One try of a task instance: the facts about Airflow that core needs (`TaskTry`), and the log of the task (`TaskLog`).

Core (`rankzero.submit.durable`) decides what a try does with an existing run, and queries the try: whether another try
follows, whether a user has ended the task.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_rankzero import _compat
from airflow_rankzero._compat import (
    AirflowFailException,
    AirflowRescheduleException,
    TaskDeferred,
    conf,
)
from airflow_rankzero.links import push_links
from rankzero.errors import RankZeroError, RunCancelledError, RunNotFoundError
from rankzero.pipeline import store
from rankzero.pipeline import tries as try_rules

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

    from rankzero import Launcher, RunHandle
    from rankzero.pipeline import LineWritten

logger = logging.getLogger(__name__)

GENERATION = "generation"  # Key of a delivery's receiver: the chain of tries that a deferred task belongs to
MAX_RETRY_DELAY = timedelta(hours=24)  # Airflow's own limit of an exponential delay
STEM_LIMIT = 180  # Characters of a run's name before the checksum; core allows 200 in all

STATES_OF_USERS = ("failed", "success", "skipped", "upstream_failed", "removed", "restarting", None)
"""States of a task instance that a user has marked or cleared while its process was running."""

END_TIMEOUT = 30.0  # Seconds beyond stop_grace in which a cancelled run ends, else its lease ends it
FOLLOW_INTERVAL = 0.1  # Seconds between two polls of a run directory on a local disk
LONGEST_WAIT = 1.0  # Most seconds until this process notices that it was asked to exit
PROGRESS_INTERVAL = 60.0  # Seconds without a line after which the log shows the training's progress

RESCHEDULE_AFTER = timedelta(seconds=60)
"""Pause before Airflow schedules a drained task on another worker: until this process's exit has reached its executor,
which would else count as the death of the new process. (Airflow's own reschedules pause as long.)"""


@dataclass(frozen=True)
class TaskTry:
    """A try of a task instance, with the facts about Airflow that core needs.

    Attributes:
        ti: The task instance that Airflow passes to the operator.
    """

    ti: Any
    # Attaching keeps the submission's lease, and no process ends the retries, since the scheduler is a service.
    lease_when_attached: ClassVar[None] = None
    retrier: ClassVar[None] = None

    @property
    def receiver(self) -> dict[str, Any]:
        """Identifies this try in the record of a delivery, which Airflow's listener acknowledges."""
        return {"task_instance": str(getattr(self.ti, "id", "")), "try": self.ti.try_number}

    @property
    def map_index(self) -> int:
        """The index of a mapped task; -1 for others."""
        return -1 if self.ti.map_index is None else int(self.ti.map_index)

    def is_replaced(self, handle: RunHandle[Any]) -> bool:
        """Returns True if the run that this try follows was ended for an earlier try, which a user has cleared.

        The process that ends it may learn of the clear after this try has attached.
        """
        receiver = handle.cancelled_for() if handle.status().state == "cancelled" else {}
        return bool(receiver) and receiver != self.receiver

    @property
    def is_followed_by_another(self) -> bool:
        """Returns True where a worker runs the task (a drained one costs no try), or if the task is deferred."""
        return not _compat.is_in_process() or bool(getattr(self.ti.task, "deferrable", False))

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
        """Returns False: Airflow's listener (`airflow_rankzero.listeners`) has already acknowledged a stored result."""
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

    def state(self, query: Callable[..., dict[str, Any]] | None = None, unknown: str = "running") -> str | None:
        """Returns the state that Airflow has of the task instance; ``unknown`` if the query fails.

        If it is none of `STATES_OF_USERS`, a process was asked to exit because its worker shuts down, or because
        Airflow missed its heartbeats, counts it as dead, and schedules a retry. Must not be called in a signal handler:
        it sends a request to the supervisor, and the handler may have interrupted another request.
        """
        try:
            return state_of(self.ti, query or self.ti.get_task_states)
        except Exception:
            # The whole deployment may be stopping: the run's lease ends it if no process follows it again.
            logger.warning("cannot ask Airflow whether this task was ended by a user", exc_info=True)
            return unknown


def lease(task: BaseOperator, ti: Any, *, deferred: bool) -> float:
    """Returns the seconds without a follower in which Airflow notices the death of a try, and starts the next one."""
    least = try_rules.DETACHED_LEASE if deferred else try_rules.SCHEDULING_SLACK
    if not TaskTry(ti).is_retried:
        return least
    unnoticed = conf.getint("scheduler", "task_instance_heartbeat_timeout", fallback=300)
    rules = getattr(getattr(task, "retry_policy", None), "rules", ())
    delays = [rule.retry_delay.total_seconds() for rule in rules if rule.retry_delay is not None]
    return try_rules.lease(max(_own_delay(task, ti.max_tries), *delays, 0.0), unnoticed=unnoticed, least=least)


def _own_delay(task: BaseOperator, tries: int) -> float:
    """Returns the longest retry delay of the task itself, in seconds."""
    delay = task.retry_delay.total_seconds()
    growth: float | bool | None = task.retry_exponential_backoff
    # Airflow 3.1 has a flag here, which doubles the delay.
    factor = 2.0 if growth is True else float(growth or 1.0)
    if factor <= 1.0:
        return float(delay)
    bound = task.max_retry_delay or MAX_RETRY_DELAY
    longest = bound.total_seconds() if isinstance(bound, timedelta) else float(bound)
    # Airflow adds up to as much again, by chance.
    return min(longest, try_rules.longest_delay(delay, 2 * try_rules.power(factor, max(0, tries - 1)), longest))


def state_of(ti: Any, ask: Callable[..., dict[str, Any]]) -> str | None:
    """Queries the current state of a task instance; None after a clear, or if its DAG run was deleted.

    ``ask`` is ``get_task_states`` of the process's own task instances. Raises its exceptions.
    """
    mapped = {"map_index": ti.map_index} if ti.map_index is not None and ti.map_index >= 0 else {}
    states = ask(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], **mapped)
    # A mapped task's key has its index at the end.
    return next((None if state is None else str(state) for state in states.get(ti.run_id, {}).values()), None)


def run_id_of(dag_id: str, dag_run_id: str, task_id: str, map_index: int) -> str:
    """Returns a name for the run of one task instance, the same in all its tries; -1 is the index of an unmapped task.

    It is ``dag__run__task[__map]-`` and a checksum of the four, since what cannot stand in the name of a directory is
    replaced there, and long names are cut.

    Example:
        >>> run_id_of("digits", "manual__2026-01-01T00:00:00+00:00", "train", -1)
        'digits__manual__2026-01-01T00-00-00+00-00__train-e2a272a94de9b56a'
    """
    parts = [dag_id, dag_run_id, task_id, *([str(map_index)] if map_index >= 0 else [])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "__".join(parts)).lstrip("._=+-") or "task"
    return f"{stem[:STEM_LIMIT]}-{digest[:16]}"


def has_set(state: str | None) -> str:
    """Returns the reason for the end of a training whose task Airflow has in a state; None: it has none."""
    return f"Airflow has set the task to {state}" if state else "Airflow has no state of the task, as after a clear"


def end(handle: RunHandle[Any], stop_grace: float, receiver: Mapping[str, Any] | None, reason: str) -> None:
    """Cancels a run and waits for its end. A run that cannot be cancelled now ends when its lease expires."""
    with contextlib.suppress(OSError, RankZeroError):
        handle.cancel(receiver, reason)
        handle.wait(stop_grace + END_TIMEOUT)


def end_cleared(launcher: Launcher, task_try: TaskTry, log: Any) -> None:
    """Ends the run of a try that a user has cleared while it was deferred, if its trigger has not ended it."""
    # Imported here: each process of Airflow imports this module.
    from rankzero import RunHandle

    assert launcher.run_id
    directory = store.normalize(store.join(store.root_of(launcher.store), launcher.run_id))
    if store.why_untrusted(directory):
        # `open_run` refuses it.
        return
    with contextlib.suppress(RunNotFoundError):
        before = RunHandle.attach(directory, follows=False)
        follower = before.delivery().receiver
        if before.status().final:
            return
        if follower.get(GENERATION, task_try.generation) != task_try.generation:
            log.info("the deferred task was cleared; %s ends, and is submitted again", before.directory)
            before.cancel(follower, "the deferred Airflow task was cleared")


# -- the log of a task -------------------------------------------------------------------------


@contextlib.contextmanager
def interrupts_end() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process where no worker runs the task.

    Airflow takes an interrupt for a failure there: its loop would start the next try or task in this process.
    """
    try:
        yield
    except KeyboardInterrupt:
        if _compat.is_in_process():
            _exit_by(signal.SIGINT)
        raise


def _exit_by(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


class TaskLog:
    """Shows a run in the log of its task, to its end or until ``operator.is_killed``: Airflow ends the process."""

    def __init__(self, handle: RunHandle[Any], task_try: TaskTry, operator: Any) -> None:
        # Imported here, since a DAG file that is only parsed does not need it.
        from rankzero.pipeline import Follower

        self._handle = handle
        self._follower = Follower(handle, ranks=operator.log_ranks)
        self._try = task_try
        self._operator = operator
        self._log = operator.log
        self._tick = threading.Event()

    def follow(self) -> None:
        """Shows the run's lines until the run has ended.

        Raises:
            AirflowRescheduleException: this worker is shut down; the training continues.
            AirflowFailException: Airflow has set the task to failed, which ended the training.
            rankzero.RunCancelledError: Airflow has set the task to another state, or a user cleared it; the same.
        """
        from rankzero.pipeline import EngineOpened, LineWritten

        shown = time.monotonic()
        while True:
            for event in self._follower.poll():
                if isinstance(event, EngineOpened):
                    push_links(self._try.ti, spark_ui=event.url)
                elif isinstance(event, LineWritten):
                    show_line(self._log, event)
                    shown = time.monotonic()
                if self._operator.is_killed:
                    break
            if self._follower.ended:
                return
            self.detach_if_killed()
            self._pause()
            if time.monotonic() - shown > PROGRESS_INTERVAL and (status := self._follower.status):
                shown = time.monotonic()
                self._log.info(
                    "%s for %.0f s %s", status.state, time.time() - self._handle.job.created, status.metrics or ""
                )

    def _pause(self) -> None:
        until = time.monotonic() + max(FOLLOW_INTERVAL, self._handle.pace)
        while not self._operator.is_killed and (left := until - time.monotonic()) > 0:
            # An Event, not a sleep: exceptions of signal handlers are raised immediately.
            self._tick.wait(min(left, LONGEST_WAIT))

    def detach_if_killed(self) -> None:
        """Detaches from the run or ends it if this process was asked to exit; else a no-op. Raises like `follow`."""
        if not self._operator.is_killed:
            return
        if (state := self._try.state()) in STATES_OF_USERS:
            what = has_set(state)
            end(self._handle, self._operator.stop_grace, self._try.receiver, what)
            why = f"{what}, which ended the run in {self._handle.directory}"
            if state == "failed":
                # With tries left, Airflow would else notify of a retry, which never comes.
                raise AirflowFailException(why) from RunCancelledError(why, requested=True)
            # After any other mark and after a clear the task has neither failed, nor is this try retried.
            task = self._try.ti.task
            task.on_retry_callback = task.on_failure_callback = ()
            task.email = None
            raise RunCancelledError(why, requested=True)
        if _compat.is_in_process():
            self._log.warning("this process was asked to exit, and the run in %s ends with it", self._handle.directory)
            end(self._handle, self._operator.stop_grace, None, "the process of the Airflow task was asked to exit")
            # Airflow's loop would start the next try or task in this process.
            _exit_by(signal.SIGTERM)
        self._log.warning(
            "this process was asked to exit; the run in %s continues until its lease ends, or a process of this task "
            "attaches to it",
            self._handle.directory,
        )
        # Not a failure: it costs no try.
        raise AirflowRescheduleException(datetime.now(UTC) + RESCHEDULE_AFTER)


def show(log: Any, title: str, facts: Mapping[str, Any]) -> None:
    """Writes facts that are not empty as a group of lines, which Airflow's UI shows as its title until it is opened."""
    lines = [f"{name}: {value}" for name, value in facts.items() if value not in (None, "", {}, [])]
    for line in (f"::group::{title}", *lines, "::endgroup::"):
        log.info("%s", line)


def show_line(log: Any, line: LineWritten) -> None:
    """Writes a line of a rank; a group that it would open or end is only a text."""
    # An invisible character within, since Airflow's page searches whole lines.
    log.info("%s", re.sub(r"::(?=(?:end)?group::)", ":\u200b:", line.text))
