"""Submitting a run id: one submitter starts it, whatever else happens; an existing run is attached to.

What dies where: after `RunDirectory.claim` and before ``job.json`` the claim is void, immediately for a submitter on
the same host and else after `CLAIM_TIMEOUT`, and the next submitter takes the next number. After ``job.json`` and
before the driver's first heartbeat the run counts as one whose driver died, and the next submission continues it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rankzero import store
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import EngineError, InvalidJobError, RunNotFoundError
from rankzero.host.processes import is_gone
from rankzero.job import Job
from rankzero.run import delivery
from rankzero.run.checkpoints import FOLDER
from rankzero.run.detach import PipelineTry
from rankzero.run.directory import RunDirectory, RunStatus, compare_job
from rankzero.run.handle import RunHandle
from rankzero.run.identity import Asked, Comparison, describe
from rankzero.run.liveness import dead_after
from rankzero.run.reconcile import Decision, decide
from rankzero.values.envelope import Part

logger = logging.getLogger(__name__)

CLAIM_TIMEOUT = 20.0
"""Seconds after which a submitter on another host that claimed a run and did not write it counts as dead."""

_LOOK = 0.05

_MOST_NAMED = 5
"""Checkpoints that a line of the log names."""


@dataclass(frozen=True)
class Existing:
    """A run that is there already.

    Attributes:
        job: What its last submission asked for.
        status: Its state now, ``"failed"`` if its driver died.
        decision: What submitting a training under its id means.
        ending: It lives, and was asked to end, or its owner has exited: who submits it again wants another.
        comparison: With the training that is asked for.
    """

    job: Job
    status: RunStatus
    decision: Decision
    ending: bool
    comparison: Comparison


def _check_owner(run: RunDirectory) -> None:
    """Raises InvalidJobError for a directory that another user made: what lies there is executed by this one."""
    if why := store.why_untrusted(run.directory):
        raise InvalidJobError(f"the run directory {run.directory} {why}")


def find(run: RunDirectory) -> RunHandle[Any] | None:
    """The run in this directory; None if there is none yet. Starts nothing.

    Raises:
        InvalidJobError: the store cannot be read, or the directory is another user's.
    """
    _check_owner(run)
    try:
        return RunHandle.attach(run.directory)
    except RunNotFoundError:
        return None
    except OSError as error:
        raise InvalidJobError(f"the store cannot be read: {run.directory}: {error}") from error


def look(run: RunDirectory, asked: Asked, caller: PipelineTry | None = None) -> Existing | None:
    """Returns what submitting a training under this run id would mean now; None if there is no such run.

    A driver on another host that does not show a heartbeat is watched until it does or counts as dead.

    Args:
        run: Its directory.
        asked: What is asked for.
        caller: A pipeline step, which is asked whether its orchestrator has the result; that is then acknowledged.
    """
    found = _state(run)
    if found is None:
        return None
    job, status, ending = found.job, found.status, found.ending
    delivered = delivery.read(run.directory, job.submission)
    if caller and delivered.receiver and not delivered.acknowledged and caller.has_accepted(delivered.receiver):
        delivered = replace(delivered, acknowledged=True)
        delivery.write(run.directory, delivered)
    comparison = compare_job(run, job, asked)
    decision = decide(
        status.state,
        same_training=comparison.same,
        acknowledged=delivered.acknowledged,
        ending=ending,
        same_generation=caller is not None and delivered.acknowledged and caller.repeats(delivered.receiver),
        by_name=asked.by_name,
    )
    if decision is Decision.DELIVER and status.result and not store.exists(status.result["uri"]):
        logger.warning("the result of run %s was deleted, so it goes on from its last checkpoint", run.directory)
        decision = Decision.RESUME
    return Existing(job, status, decision, ending, comparison)


@dataclass(frozen=True)
class _State:
    job: Job
    status: RunStatus
    ending: bool


def _state(run: RunDirectory) -> _State | None:
    """Returns what the last submission asked for, its state, and whether it is ending; None if there is none."""
    _check_owner(run)
    try:
        job = run.job()
    except RunNotFoundError:
        return None
    owner_is_gone = bool(job.owner and is_gone(job.owner))
    status = _await_certainty(RunHandle(run.directory), job, owner_is_gone)
    ending = not status.final and (owner_is_gone or run.cancel_requested(job.submission))
    return _State(job, status, ending)


def _await_certainty(handle: RunHandle[object], job: Job, owner_is_gone: bool) -> RunStatus:
    """Returns the status once the driver has shown a heartbeat or counts as dead.

    A run whose submitter was killed before it had started the driver shows the heartbeat that the submitter wrote.
    """
    status = handle.status()
    never_driven = not (status.final or status.driver_pid)
    is_written = status.submission == job.submission
    claimant = RunDirectory(handle.directory).claimant(status.submission) if never_driven else None
    submitter_is_gone = bool(claimant and is_gone(claimant))
    if never_driven and (owner_is_gone and not status.patience if is_written else submitter_is_gone):
        # A driver that starts now finds that its owner has exited; one of a submission without a job never starts.
        return replace(status, state="failed")
    is_driver = not submitter_is_gone or status.patience > 0
    seen, deadline = status.heartbeat, time.monotonic() + 2 * dead_after(status)
    tick = threading.Event()
    while not (status.final or handle.driver_lives(status)) and time.monotonic() < deadline:
        is_young = time.time() - status.heartbeat < max(status.interval, status.patience)
        if status.heartbeat != seen or (is_young and is_driver):
            break
        tick.wait(_LOOK)
        status = handle.status()
    return status


def submit(
    run: RunDirectory,
    asked: Asked,
    make_job: Callable[[int, int, int], Job],
    files: dict[str, list[Part]],
    patience: float = 0.0,
) -> bool:
    """Makes this the next submission of the run, unless the same training lives or waits to be delivered.

    Args:
        run: Its directory, which may not be there yet.
        asked: What is asked for.
        make_job: Makes the job of a submission from its number, its first attempt and `Job.fresh_since`.
        files: Payload, modules and their list, by name: the parts of each.
        patience: Seconds for its driver to show its first heartbeat, if these are many.

    Returns:
        True if the caller must start a driver; False if somebody else did: attach.

    Raises:
        InvalidJobError: the store cannot be written, or another training lives under this run id.
        EngineError: the run was cancelled and does not end.
    """
    try:
        number = 0
        while True:
            existing = look(run, asked)
            if existing and existing.ending:
                await_end(run, existing.job)
                continue
            if existing and existing.comparison.unknown:
                logger.warning(
                    "it is unknown whether run %s is the same training, since another version of Python or rankzero "
                    "submitted it: it counts as the same",
                    run.directory,
                )
            if existing and existing.decision in (Decision.ATTACH, Decision.DELIVER):
                state = existing.status.state
                logger.warning("run %s is there already (%s); this submission attaches to it", run.directory, state)
                if existing.decision is Decision.DELIVER:
                    store.remove_unfinished(run.directory)
                return False
            if existing and not existing.status.final:
                raise InvalidJobError(
                    f"run_id {existing.job.run_id!r} is running another training (different: "
                    f"{describe(existing.comparison.differing)}): cancel it with "
                    f"RunHandle.attach({run.directory!r}).cancel(), or choose another run_id"
                )
            if existing:
                number = max(number, existing.job.submission + 1)
            store.prove(os.path.dirname(run.directory))
            if run.claim(number):
                # It may be there since a moment ago, made by somebody else.
                _check_owner(run)
                store.remove_unfinished(run.directory)
                run.write_files(number, files)
                if run.newest_claim() == number:
                    first_attempt = fresh_since = 0
                    if existing:
                        first_attempt = 1 + max(existing.status.attempt, _last_attempt(run))
                        fresh_since = first_attempt if existing.decision is Decision.FRESH else existing.job.fresh_since
                    run.write_submission(make_job(number, first_attempt, fresh_since), patience)
                newest = run.newest_claim()
                if newest == number:
                    if existing:
                        _report_earlier(run, existing)
                    return True
                # This took so long that another submitter thought us dead: it is its run now.
                number = newest
                with contextlib.suppress(FileNotFoundError):
                    run.restore(newest)
            if not _await_submission(run, number):
                number += 1
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, InvalidJobError):
            raise
        raise InvalidJobError(f"the store cannot be written: {run.directory}: {error}") from error


def _report_earlier(run: RunDirectory, existing: Existing) -> None:
    """Logs what becomes of the checkpoints of the training that had the run id before."""
    if existing.decision is Decision.RESUME and existing.comparison.differing:
        changed = describe(existing.comparison.differing)
        logger.warning("run %s resumes from its last checkpoint with another training: %s", run.directory, changed)
    if existing.decision is Decision.FRESH:
        left = [name for name in store.list_names(run.path(FOLDER)) if name.partition("-")[0].isdecimal()]
        if left:
            logger.warning(
                "run %s begins from scratch; the checkpoints of the training before stay until `rankzero gc` removes "
                "them: %s",
                run.directory,
                ", ".join(left[-_MOST_NAMED:]),
            )


def _await_submission(run: RunDirectory, number: int) -> bool:
    """Waits for another submitter, who writes ``job.json`` next, unless it died (or removed an old run): then False."""
    deadline, tick = time.monotonic() + CLAIM_TIMEOUT, threading.Event()
    claimant = run.claimant(number)
    while _submission_of(run) < number and run.is_claimed(number) and time.monotonic() < deadline:
        if claimant and is_gone(claimant):
            break
        tick.wait(_LOOK)
    return _submission_of(run) >= number


def await_end(run: RunDirectory, job: Job) -> None:
    """Waits for the end of a run that was asked to end. Raises EngineError if it does not come."""
    bound = job.stop_grace + CANCEL_TIMEOUT
    deadline, tick = time.monotonic() + bound, threading.Event()
    # Until it has ended, or somebody else who waited for that has submitted it again.
    while (found := _state(run)) and found.ending:
        if time.monotonic() > deadline:
            raise EngineError(f"the run in {run.directory} is to end and has not ended after {bound:g} s")
        tick.wait(_LOOK)


def _last_attempt(run: RunDirectory) -> int:
    """The highest attempt that left a checkpoint: a status that could not be written may lag behind."""
    numbers = [name.partition("-")[0] for name in store.list_names(run.path(FOLDER))]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _submission_of(run: RunDirectory) -> int:
    try:
        return run.job().submission
    except RunNotFoundError:
        return -1
