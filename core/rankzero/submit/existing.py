"""Compares the run that a directory holds with a new request under its id, and waits until its state is certain."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import EngineError, InvalidJobError, RunNotFoundError
from rankzero.host.processes import is_gone
from rankzero.job import Job
from rankzero.run import delivery
from rankzero.run.directory import RunDirectory, compare_job
from rankzero.run.handle import RunHandle
from rankzero.run.identity import Asked, Comparison, Decision, decide, describe
from rankzero.run.observer import dead_after
from rankzero.run.status import RunStatus
from rankzero.run.tries import PipelineTry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Existing:
    """An existing run, compared with a new request under its id.

    Attributes:
        job: The job of its last submission.
        status: Its current status; ``"failed"`` if its driver died.
        decision: The effect of submitting a training under its id.
        ending: True if it is live but was asked to stop, its driver has decided to cancel it, or its owner has exited:
            a new submission waits for its end.
        comparison: Comparison of its training with the requested one.
    """

    job: Job
    status: RunStatus
    decision: Decision
    ending: bool
    comparison: Comparison


def check_owner(run: RunDirectory) -> None:
    """Raises InvalidJobError for a directory of another user, since its content is executed as this user."""
    if why := store.why_untrusted(run.directory):
        raise InvalidJobError(f"the run directory {run.directory} {why}", code="RZ-1010")


def find(run: RunDirectory) -> RunHandle[Any] | None:
    """Returns a handle of the run in this directory, or None if there is none yet. Starts nothing.

    Raises:
        InvalidJobError: the store cannot be read, or the directory belongs to another user.
    """
    check_owner(run)
    try:
        return RunHandle.attach(run.directory) if find_job_of(run) else None
    except RunNotFoundError:
        # Removed in between.
        return None
    except OSError as error:
        raise InvalidJobError(f"the store cannot be read: {run.directory}: {error}") from error


def find_job_of(run: RunDirectory) -> Job | None:
    """Returns the job of the run's last submission, or None. Raises InvalidJobError for one that cannot be read."""
    try:
        return run.find_job()
    except RunNotFoundError as error:
        raise InvalidJobError(
            f"{run.path('job.json')} is there and cannot be read ({error}): a run of this name may be running or hold "
            "a result, so it is not replaced: remove its directory, or choose another run_id"
        ) from error


def assess(run: RunDirectory, asked: Asked, caller: PipelineTry | None = None) -> Existing | None:
    """Returns what submitting a training under this run id would mean now; None if there is no such run.

    A driver on another host is polled until it shows a heartbeat or counts as dead.

    Args:
        run: The run's directory.
        asked: The requested training.
        caller: A pipeline step. If its orchestrator has stored the result, the result is acknowledged.
    """
    found = _state(run)
    if found is None:
        return None
    job, status, ending = found
    delivered = delivery.read(run.directory, job.submission)
    if caller and delivered.receiver and not delivered.acknowledged and caller.has_accepted(delivered.receiver):
        delivered = replace(delivered, acknowledged=True)
        delivery.write(run.directory, delivered)
    comparison = compare_job(job, asked)
    decision = decide(
        status.state,
        same_training=comparison.same,
        acknowledged=delivered.acknowledged,
        ending=ending,
        same_generation=caller is not None and delivered.acknowledged and caller.repeats(delivered.receiver),
        by_name=asked.by_name,
        automatic=asked.repeats(job.generation),
    )
    if decision is Decision.DELIVER and status.result and not store.exists(run.result_path(status.result["uri"])):
        logger.warning("the result of run %s was deleted, so it resumes from its last checkpoint", run.directory)
        decision = Decision.RESUME
    return Existing(job, status, decision, ending, comparison)


def following(existing: Existing, directory: str) -> str:
    """Returns a sentence about a run that is not started again, with what differs from the requested training."""
    if existing.decision is Decision.DELIVER:
        what = f"delivered: the run in {directory} has succeeded before"
    else:
        what = f"attached to the run in {directory}, which continues as it began"
    return what + changes(existing)


def changes(existing: Existing) -> str:
    """Returns the end of a sentence about a run that is continued: what has changed."""
    names = describe(existing.comparison.differing + existing.comparison.ignored)
    return f"; changed since: {names}" if names else ""


def _state(run: RunDirectory) -> tuple[Job, RunStatus, bool] | None:
    """Returns job and status of the last submission, and True if the run is ending; None if there is none."""
    check_owner(run)
    if (job := find_job_of(run)) is None:
        return None
    status, owner_is_gone = _judged(run, job)
    if status.submission > job.submission and (later := run.job_of(status.submission)):
        # It was submitted again meanwhile, or a delayed submitter has overwritten job.json with an older job.
        job = later
        status, owner_is_gone = _judged(run, job)
    ending = not status.final and (status.cancelling or owner_is_gone or bool(run.cancel_request(job.submission)))
    return job, status, ending


def _judged(run: RunDirectory, job: Job) -> tuple[RunStatus, bool]:
    """Returns the run's current status, and True if the process that owns this job has exited."""
    owner_is_gone = bool(job.owner and is_gone(job.owner))
    return _await_certainty(RunHandle(run.directory), job, owner_is_gone), owner_is_gone


def _await_certainty(handle: RunHandle[object], job: Job, owner_is_gone: bool) -> RunStatus:
    """Returns the status once the driver has shown a heartbeat or counts as dead.

    A submitter that was killed before it started the driver has left its own heartbeat. On a disk this process then
    claims the driver's role, so no time needs to pass: a driver claims that role before it does anything.
    """
    status = handle.status()
    never_driven = not (status.final or status.driver_pid)
    if never_driven and owner_is_gone and not status.patience:
        # A driver that starts now exits, because its owner has exited.
        return replace(status, state="failed")
    run = RunDirectory(handle.directory)
    claimant = run.claimant(status.submission) if never_driven else None
    submitter_is_gone = bool(claimant and is_gone(claimant))
    # On a disk a submitter records the process of its driver. If it was killed before that, a driver that starts later
    # finds the role claimed, and exits.
    has_no_driver = submitter_is_gone and not (status.patience or run.is_remote or handle.driver_lives(status))
    if has_no_driver and run.claim_driver(status.submission):
        return replace(status, state="failed")
    # The owner of a run may have died with its host a moment ago. Only that process can follow the run, so a young
    # heartbeat is not enough: the next one is awaited.
    may_be_young = job.owner is None and (not submitter_is_gone or status.patience > 0)
    # With a clock that is ahead, an old heartbeat lies in the future.
    is_young = may_be_young and abs(time.time() - status.heartbeat) < max(status.interval, status.patience)
    seen, deadline = status.heartbeat, time.monotonic() + 2 * dead_after(status)
    while not (is_young or status.final or handle.driver_lives(status)) and time.monotonic() < deadline:
        time.sleep(bounds.POLL_INTERVAL_SHORT)
        status = handle.status()
        is_young = status.heartbeat != seen
    return status


def await_end(run: RunDirectory, job: Job) -> None:
    """Waits for the end of a run that was asked to stop. Raises EngineError if it does not end in time."""
    bound = job.stop_grace + CANCEL_TIMEOUT()
    deadline = time.monotonic() + bound
    # Ends also when another submitter that waited for the same has submitted the run again.
    while (found := _state(run)) and found[2]:
        if time.monotonic() > deadline:
            raise EngineError(f"the run in {run.directory} was asked to stop and is still running after {bound:g} s")
        time.sleep(bounds.POLL_INTERVAL_SHORT)
