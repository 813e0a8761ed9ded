"""Compares the run that a directory holds with a new request under its id, and writes the next submission into it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import EngineError, InvalidJobError, RunNotFoundError
from rankzero.host.processes import is_gone
from rankzero.job import Job
from rankzero.run.checkpoints import digest_of_loaded, list_committed, list_folders
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.identity import CODE_VERSION, MODULE, Comparison, Decision, compare, decide, describe
from rankzero.run.status import SHORTEST_PACE, RunStatus
from rankzero.run.tries import PipelineTry
from rankzero.values.pickled import Part

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Existing:
    """An existing run, compared with a new request under its id."""

    own: Submission  # Its last submission
    status: RunStatus  # Its current status; ``"failed"`` if its driver died
    decision: Decision  # The effect of submitting a training under its id
    automatic: bool  # The orchestrator repeats by itself the try that submitted it: of one chain of tries
    # It is live but was asked to stop, its driver has decided to cancel it, or its owner has exited: a new submission
    # waits for its end
    ending: bool
    comparison: Comparison  # Of its training with the requested one

    @property
    def is_followed(self) -> bool:
        """Returns True if the run is not submitted again."""
        return self.decision in (Decision.ATTACH, Decision.DELIVER) and not self.ending

    @property
    def following(self) -> str:
        """Returns a sentence about a run that is not submitted again, with what differs from the requested training."""
        directory = self.own.run.directory
        if self.decision is Decision.DELIVER:
            return f"delivered: the run in {directory} has succeeded before{self.changes}"
        return f"attached to the run in {directory}, which continues as it began{self.changes}"

    @property
    def changes(self) -> str:
        """Returns the end of a sentence about a run that is continued: what has changed."""
        names = describe(self.comparison.differing + self.comparison.ignored)
        return f"; changed since: {names}" if names else ""


def check_owner(run: RunDirectory) -> None:
    """Raises InvalidJobError for a directory of another user, since its content is executed as this user."""
    if why := store.why_untrusted(run.directory):
        raise InvalidJobError(f"the run directory {run.directory} {why}", code="RZ-1010")


def find(run: RunDirectory) -> RunHandle[Any] | None:
    """Returns a handle of the run in this directory, or None if there is none yet. Raises InvalidJobError."""
    with storing(run):
        check_owner(run)
        job = run.newest()[1]
    return RunHandle(run.directory, job=job) if job else None


def assess(own: Submission, asked: Mapping[str, str], caller: PipelineTry | None, *, automatic: bool) -> Existing:
    """Returns what submitting a training under this run id would mean now. Raises RunNotFoundError.

    A driver on another host is polled until it shows a heartbeat or counts as dead. If the orchestrator of the caller,
    a pipeline step, has stored the result, the result is acknowledged.
    """
    job = own.job
    status, ending = _state(own)
    delivered = own.delivery()
    if caller and delivered.receiver and not delivered.acknowledged and caller.has_accepted(delivered.receiver):
        delivered = replace(delivered, acknowledged=True)
        own.record_delivery(delivered)
    comparison = compare(job.identity_parts, asked, automatic=automatic)
    if comparison.same and not automatic and CODE_VERSION not in asked:
        committed = list_committed([*own.earlier(), own.directory])
        loaded = committed[-1].loaded if committed else {}
        # A file that is not on this host counts as equal.
        edited = [path for path, digest in loaded.items() if digest_of_loaded(path) not in ("", digest)]
        comparison = Comparison(tuple(f"{MODULE}{path}" for path in sorted(edited)))
    decision = decide(
        status.state,
        same_training=comparison.same,
        acknowledged=delivered.acknowledged,
        same_generation=caller is not None and delivered.acknowledged and caller.repeats(delivered.receiver),
        automatic=automatic,
    )
    if decision is Decision.DELIVER and status.result and not store.exists(own.result_path(status.result["uri"])):
        logger.warning("the result of run %s was deleted, so it resumes from its last checkpoint", own.run.directory)
        decision = Decision.RESUME
    return Existing(own, status, decision, automatic, ending, comparison)


def _state(own: Submission) -> tuple[RunStatus, bool]:
    """Returns the status of a submission, and True if it is ending.

    A driver that this process cannot query is awaited until it shows a heartbeat or counts as dead.
    """
    handle, job = RunHandle[Any](own.run.directory, job=own.job), own.job
    status = handle.status()
    # The owner of a run may have died with its host a moment ago. Only that process can follow the run, so a young
    # heartbeat is not enough. So it is behind a submitter that has started no driver. With a clock that is ahead, an
    # old heartbeat lies in the future.
    may_be_young = job.owner is None and (status.driver_pid or job.queue_time)
    is_sure = may_be_young and abs(time.time() - status.heartbeat) < max(status.interval, status.queue_time)
    seen = status.heartbeat
    while not (is_sure or status.final or handle.driver_lives(status)):
        time.sleep(_pause(own))
        status = handle.status()
        is_sure = status.heartbeat != seen
    is_orphan = job.owner is not None and is_gone(job.owner)
    return status, not status.final and (status.cancelling or is_orphan or bool(own.cancel_request()))


def await_end(own: Submission) -> None:
    """Waits for the end of a submission that was asked to stop. Raises EngineError if it does not end in time."""
    bound = own.job.stop_grace + CANCEL_TIMEOUT()
    deadline = time.monotonic() + bound
    # It is over, too, once the run is removed.
    with contextlib.suppress(RunNotFoundError):
        while _state(own)[1]:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the run in {own.run.directory} was asked to stop and is still running after {bound:g} s"
                )
            time.sleep(_pause(own))


def ends(found: Existing, caller: PipelineTry | None) -> bool:
    """Returns True once a run that is not followed has ended for good; False if it must be looked at again.

    A living run of another training is ended for a pipeline step; for another caller, this raises InvalidJobError.
    """
    own, what = found.own, describe(found.comparison.differing)
    directory = own.run.directory
    if found.ending:
        await_end(own)
    elif found.status.final:
        # Its folder may have been deleted. If the whole run was, no claim of the next number succeeds.
        with contextlib.suppress(FileNotFoundError):
            # Its driver may live although it seems dead. From here on it stops as soon as it looks.
            return own.finish(found.status).state == found.status.state
        return True
    elif caller is None:
        raise InvalidJobError(
            f"run_id {own.job.run_id!r} is running another training (different: {what}): cancel it with "
            f"RunHandle.attach({directory!r}).cancel(), or choose another run_id",
            code="RZ-1009",
        )
    else:
        RunHandle[Any](directory, job=own.job).cancel(reason="another training was submitted in its place")
        await_end(own)
        logger.warning("ended the run in %s: changed since: %s", directory, what)
    return False


def _pause(own: Submission) -> float:
    # On an object store each look is a request.
    return SHORTEST_PACE if own.is_remote else bounds.POLL_INTERVAL_SHORT


# -- the next submission -----------------------------------------------------------------------


@contextlib.contextmanager
def storing(run: RunDirectory) -> Iterator[None]:
    """Turns errors of the store in the block into InvalidJobError."""
    try:
        yield
    except InvalidJobError:
        raise
    except RunNotFoundError as error:
        raise InvalidJobError(f"the run in {run.directory} cannot be read, so it is not replaced: {error}") from error
    except (OSError, ImportError, ValueError) as error:
        raise InvalidJobError(f"the store cannot be used: {run.directory}: {error}", code="RZ-1008") from error


def check_writable(run: RunDirectory) -> None:
    """Writes into the store, which may raise. Raises InvalidJobError if the directory holds files of others."""
    if store.exists(run.directory) and not run.names() and (found := run.strangers()):
        some = ", ".join(sorted(found)[:5])
        raise InvalidJobError(f"{run.directory} holds files of others ({some}): choose another run_id or store")
    store.prove(os.path.dirname(run.directory))


def claim(own: Submission, files: Mapping[str, list[Part]]) -> bool:
    """Writes the files of a submission and then claims its number; False if another process was faster."""
    with storing(own.run):
        try:
            own.write_files(files)
            # Another user may have created the directory meanwhile.
            check_owner(own.run)
            if own.run.claim(own.job):
                store.remove_unfinished(own.run.directory)
                return True
        except FileNotFoundError:
            # The run was removed meanwhile.
            if own.run.names() and store.exists(own.directory):
                raise
        store.remove(own.directory)
        return False


def behind(found: Existing | None, job: Job) -> Job:
    """Returns the job of the next submission, which continues the training of the existing run if that is decided."""
    if found is None:
        return replace(job, beginning="from scratch: it is the first submission under this id")
    before = found.own
    places = [*before.earlier(), before.directory]
    attempts = [int(name.partition("-")[0]) for place in places for name in list_folders(place)]
    job = replace(job, first_attempt=1 + max([found.status.attempt, *attempts]))
    if found.decision is not Decision.RESUME:
        if found.comparison.differing:
            return replace(job, beginning=f"from scratch: other than before: {describe(found.comparison.differing)}")
        return replace(job, beginning="from scratch: its result was delivered")
    committed = list_committed(places)
    place = f"checkpoint {committed[-1].id}" if committed else "its beginning, since no checkpoint counts"
    return replace(
        job,
        beginning=f"resumed from {place}; to start over, change code_version{found.changes}",
        earlier=[*before.job.earlier, before.name],
        # A driver that was killed may not have written its last status.
        metrics={**found.status.metrics, **(committed[-1].metrics if committed else {})},
    )
