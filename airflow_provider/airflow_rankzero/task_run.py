"""`TaskRun`: a task's training as one of its tries sees it: started or taken up, followed, left, ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from airflow.sdk.exceptions import AirflowException, AirflowRescheduleException

from airflow_rankzero import delivery, lines, tries
from airflow_rankzero.links import push_links
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import RankZeroError, RunCancelledError
from rankzero.launcher import Launcher
from rankzero.run.growing import Position
from rankzero.run.handle import FOLLOW_INTERVAL_REMOTE, RunHandle
from rankzero.store import is_url

FOLLOW_INTERVAL = 0.1
"""Seconds between two looks at a run directory on a local disk."""

PROGRESS_INTERVAL = 60.0
"""Seconds of silence after which the log says that the training goes on."""

RESCHEDULE_AFTER = timedelta(seconds=60)
"""Pause before Airflow gives a drained task to another worker: until the end of this process has reached its executor,
which would else be taken for the death of the new one. (Airflow's own reschedules pause as long.)"""

MAX_RESCHEDULES = 20
"""Drains of one try that cost nothing; after that, a place that never lasts costs tries."""


class TaskRun:
    """One try's view of a run.

    Attributes:
        handle: The run.
        since: Where each rank's lines ended before this training.
    """

    def __init__(
        self,
        handle: RunHandle[Any],
        since: Mapping[int, Position],
        ti: Any,
        stop_grace: float,
        is_killed: Callable[[], bool],
        log: Any,
    ) -> None:
        """Takes a run that somebody has started.

        Args:
            handle: The run.
            since: Where each rank's lines ended before this training.
            ti: The task instance.
            stop_grace: Seconds that its ranks get to end.
            is_killed: True once Airflow has told this process to go.
            log: The operator's logger, whose lines are the task's log.
        """
        self.handle = handle
        self.since = since
        self._ti = ti
        self._patience = stop_grace + CANCEL_TIMEOUT
        self._is_killed = is_killed
        # Airflow counts them for each try.
        self._drains = int(ti.get_template_context().get("task_reschedule_count") or 0)
        self._log = log

    @staticmethod
    def start(
        launcher: Launcher,
        train: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ti: Any,
        is_killed: Callable[[], bool],
        log: Any,
    ) -> TaskRun:
        """Starts the training, or takes up what an earlier try has started.

        Raises:
            rankzero.InvalidJobError: the job cannot be run as described.
            rankzero.RankZeroError: an earlier run does not end.
        """
        before = launcher.find()
        if before:
            arguments = (launcher.labels or {})["arguments"]
            delivery.settle(before, ti, arguments, launcher.stop_grace + CANCEL_TIMEOUT)
            # Nothing of the job needs to be read again: a file or a connection may be gone by now.
            if waiting := launcher.take_up():
                log.info("took up the run in %s", waiting.directory)
                return TaskRun(waiting, {}, ti, launcher.stop_grace, is_killed, log)
        ends = before.ends() if before else {}
        handle = launcher.submit(train, *args, **kwargs)
        log.info("started the run in %s", handle.directory)
        return TaskRun(handle, ends, ti, launcher.stop_grace, is_killed, log)

    def follow(self) -> None:
        """Shows what the ranks write until the run has ended.

        Raises:
            AirflowRescheduleException: this worker goes away; the training does not.
            rankzero.RunCancelledError: a user ended the task, and so the training.
            BaseException: what interrupted this; the training has ended too, unless another try comes for it.
        """
        try:
            self._follow()
        except (AirflowRescheduleException, RunCancelledError):
            raise
        except BaseException as error:
            if not (isinstance(error, Exception) and tries.another_follows(self._ti)):
                # A timeout, an interrupt, or a failure that no try comes after.
                self.end()
            raise

    def _follow(self) -> None:
        handle = self.handle
        interval = FOLLOW_INTERVAL_REMOTE if is_url(handle.directory) else FOLLOW_INTERVAL
        positions = lines.begin(handle, self.since)
        tick = threading.Event()
        shown = time.monotonic()
        url = None
        while True:
            status = handle.status()
            if status.engine_url and url is None:
                url = status.engine_url
                push_links(self._ti, spark_ui=url)
            for line in handle.lines(positions, follow=False, prefix=True):
                self._log.info("%s", line)
                shown = time.monotonic()
                if self._is_killed():
                    break
            if status.final:
                return
            if self._is_killed():
                self.leave()
            # An Event, not a sleep: exceptions of signal handlers get out at once.
            tick.wait(interval)
            if time.monotonic() - shown > PROGRESS_INTERVAL:
                shown = time.monotonic()
                self._log.info("%s for %.0f s %s", status.state, time.time() - handle.created, status.metrics or "")

    def leave(self) -> NoReturn:
        """This process was told to go: with its worker, or by a user."""
        if not tries.was_ended_by_a_user(self._ti):
            self._log.warning(
                "this worker goes away; the training in %s goes on, and this task takes it up on another",
                self.handle.directory,
            )
            if self._drains >= MAX_RESCHEDULES:
                raise AirflowException(f"the workers of this task went away {MAX_RESCHEDULES} times, and now again")
            # Not a failure: it costs no try.
            raise AirflowRescheduleException(datetime.now(UTC) + RESCHEDULE_AFTER)  # type: ignore[no-untyped-call]
        self.end()
        raise RunCancelledError(f"the task was ended by a user, and the run in {self.handle.directory} with it")

    def end(self) -> None:
        """Cancels the run and waits for its end."""
        # If the request cannot be written, the run's lease ends it.
        with contextlib.suppress(OSError, RankZeroError):
            self.handle.cancel()
            self.handle.wait(self._patience)
