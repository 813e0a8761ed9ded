"""What a driver begins with that is not the first of its submission: the next pod of a Kubernetes Job, a stage's own.

A lost driver is a lost attempt. Of two that both think themselves the driver, the one that came later writes: it has
claimed the place behind the other's, which finds that before its next write.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, replace

from rankzero.driver.policy import Restarts
from rankzero.errors import LOST, EngineError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.run.liveness import HeartbeatWatch

logger = logging.getLogger(__name__)

_LOOK = 1.0
"""Seconds between two looks whether the driver before lives."""


@dataclass(frozen=True)
class Start:
    """Of a driver that others may follow.

    Attributes:
        attempt: Its first.
        budget: Of restarts that are left.
        number: Which driver of its submission it is, from 0; None where another submission follows.
        patience: Seconds without a heartbeat that readers wait for the next driver.
        lost: What has ended the driver before.
    """

    attempt: int
    budget: Restarts
    number: int | None = None
    patience: float = 0.0
    lost: EngineError | None = None


def first(job: Job) -> Start:
    """Of the first driver of a submission."""
    return Start(job.first_attempt, Restarts(job.max_restarts, job.max_preemptions), 0, job.start_timeout)


def spent(job: Job, status: RunStatus) -> Restarts:
    """The budget of a submission whose driver was lost, as far as that had used it.

    Args:
        job: Of the run.
        status: What the lost driver wrote last.
    """
    used = max(0, status.attempt - job.first_attempt)
    preemptions = min(used, status.preemptions)
    return Restarts(job.max_restarts, job.max_preemptions, used - preemptions, preemptions)


def after(job: Job, status: RunStatus, number: int) -> Start | EngineError:
    """Of the driver that comes when one was lost, or the error of a run that may not be started again.

    Args:
        job: Of the run.
        status: What the lost driver wrote last.
        number: Of the driver that comes.
    """
    lost = EngineError(
        f"the driver of the run was lost, on {status.driver_host or 'its way to the cluster'}", cause=LOST
    )
    left = spent(job, status).after(LOST)
    if left is None:
        return EngineError(f"{lost}, and max_restarts={job.max_restarts} allows no further attempt", cause=LOST)
    return Start(status.attempt + 1, left[0], number, job.start_timeout, lost)


def take_place(run: RunDirectory, job: Job) -> Start | None:
    """Waits until the driver before has ended, and takes its place; None for a run that has ended.

    Raises:
        EngineError: another one was faster.
    """
    status = _await_silence(run, job.submission)
    if status.final or status.submission != job.submission:
        return None
    number = next(number for number in itertools.count(1) if not run.has_driver(job.submission, number))
    if not run.claim_driver(job.submission, number):
        raise EngineError("another process drives the run")
    if status.certain:
        run.write_status(replace(status, state="succeeded", ended=status.heartbeat))
        return None
    start = after(job, status, number)
    if isinstance(start, EngineError):
        logger.error("%s", start)
        run.write_status(replace(status, state="failed", error=start.to_json(), ended=time.time()))
        return None
    return start


def _await_silence(run: RunDirectory, submission: int) -> RunStatus:
    """What the driver before wrote last, once it has ended the run or shows no heartbeat; as long as it lives."""
    watch, tick = HeartbeatWatch(), threading.Event()
    while True:
        status = run.status()
        # Others wait for us; we wait for nobody else.
        if status.final or status.submission != submission or watch.is_silent(replace(status, patience=0.0)):
            return status
        tick.wait(_LOOK)
