"""Following the run of a task's training: its lines in the task's log, until it ends or this process has to exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_rankzero import log_groups
from airflow_rankzero._compat import AirflowException, AirflowFailException, AirflowRescheduleException
from airflow_rankzero.links import push_links
from airflow_rankzero.marks import has_set
from airflow_rankzero.tries import STATES_OF_USERS, TaskTry
from rankzero import RunHandle
from rankzero.errors import RunCancelledError
from rankzero.pipeline import EngineOpened, Follower, LineWritten, end

FOLLOW_INTERVAL = 0.1
"""Seconds between two polls of a run directory on a local disk."""

LONGEST_WAIT = 1.0
"""Most seconds until this process notices that it was asked to exit."""

PROGRESS_INTERVAL = 60.0
"""Seconds without a line after which the log shows the training's progress."""

RESCHEDULE_AFTER = timedelta(seconds=60)
"""Pause before Airflow schedules a drained task on another worker: until this process's exit has reached its executor,
which would else count as the death of the new process. (Airflow's own reschedules pause as long.)"""

MAX_RESCHEDULES = 20
"""Most drains of one try that cost no retry; further ones do, so that a task cannot be rescheduled without end."""


@contextlib.contextmanager
def interrupts_end(task_try: TaskTry) -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process where no worker runs the task.

    Airflow takes an interrupt for a failure there: its loop would start the next try or task in this process.
    """
    try:
        yield
    except KeyboardInterrupt:
        if task_try.is_in_process:
            _exit_by(signal.SIGINT)
        raise


def _exit_by(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


class TaskLog:
    """Shows a run in the log of its task, to its end or until ``is_killed`` returns True: Airflow ends the process."""

    def __init__(
        self,
        handle: RunHandle[Any],
        follower: Follower,
        task_try: TaskTry,
        stop_grace: float,
        is_killed: Callable[[], bool],
        log: Any,
    ) -> None:
        self._handle = handle
        self._follower = follower
        self._try = task_try
        self._stop_grace = stop_grace
        self._is_killed = is_killed
        self._tick = threading.Event()
        self._log = log

    def follow(self) -> None:
        """Shows the run's lines until the run has ended.

        Raises:
            AirflowRescheduleException: this worker is shut down; the training continues.
            AirflowFailException: Airflow has set the task to failed, which ended the training.
            rankzero.RunCancelledError: Airflow has set the task to another state, or a user cleared it; the same.
        """
        shown = time.monotonic()
        while True:
            for event in self._follower.poll():
                if isinstance(event, EngineOpened):
                    push_links(self._try.ti, spark_ui=event.url)
                elif isinstance(event, LineWritten):
                    log_groups.show_line(self._log, event.text)
                    shown = time.monotonic()
                if self._is_killed():
                    break
            if self._follower.ended:
                return
            self.detach_if_killed()
            self._pause()
            if time.monotonic() - shown > PROGRESS_INTERVAL:
                shown = time.monotonic()
                self._report_progress()

    def _pause(self) -> None:
        until = time.monotonic() + max(FOLLOW_INTERVAL, self._handle.pace)
        while not self._is_killed() and (left := until - time.monotonic()) > 0:
            # An Event, not a sleep: exceptions of signal handlers are raised immediately.
            self._tick.wait(min(left, LONGEST_WAIT))

    def _report_progress(self) -> None:
        if status := self._follower.status:
            age = time.time() - self._handle.created
            self._log.info("%s for %.0f s %s", status.state, age, status.metrics or "")

    def detach_if_killed(self) -> None:
        """Detaches from the run or ends it if this process was asked to exit; else a no-op. Raises like `follow`."""
        if not self._is_killed():
            return
        if (state := self._try.state()) in STATES_OF_USERS:
            what = has_set(state)
            end(self._handle, self._stop_grace, self._try.receiver, what)
            why = f"{what}, which ended the run in {self._handle.directory}"
            if state == "failed":
                # With tries left, Airflow would else notify of a retry, which never comes.
                raise AirflowFailException(why) from RunCancelledError(why, requested=True)
            # After any other mark and after a clear the task has neither failed, nor is this try retried.
            task = self._try.ti.task
            task.on_retry_callback = task.on_failure_callback = ()
            task.email = None
            raise RunCancelledError(why, requested=True)
        if self._try.is_in_process:
            self._log.warning("this process was asked to exit, and the run in %s ends with it", self._handle.directory)
            end(self._handle, self._stop_grace, None, "the process of the Airflow task was asked to exit")
            # Airflow's loop would start the next try or task in this process.
            _exit_by(signal.SIGTERM)
        self._log.warning(
            "this process was asked to exit; the run in %s continues until its lease ends, or a process of this task "
            "attaches to it",
            self._handle.directory,
        )
        # Airflow counts them for each try.
        if int(self._try.ti.get_template_context().get("task_reschedule_count") or 0) >= MAX_RESCHEDULES:
            raise AirflowException(f"the workers of this task were shut down {MAX_RESCHEDULES} times, and now again")
        # Not a failure: it costs no try.
        raise AirflowRescheduleException(datetime.now(UTC) + RESCHEDULE_AFTER)  # type: ignore[no-untyped-call]
