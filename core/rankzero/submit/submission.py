"""Submits a run id: exactly one submitter starts the run, and others attach to it.

A submitter may die at any point. After `RunDirectory.claim` and before ``job.json``, its claim becomes void:
immediately for a submitter on the same host, else after `CLAIM_TIMEOUT`; the next submitter claims the next number.
After ``job.json`` and before the driver's first heartbeat, the run counts as one whose driver died, and the next
submission continues it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rankzero import bounds, store
from rankzero.data.table import FOLDER as TABLES
from rankzero.engines.base import in_thread
from rankzero.errors import EngineError, InvalidJobError, RankZeroError, RunCancelledError
from rankzero.host.processes import is_gone
from rankzero.job import Job
from rankzero.run.checkpoints import Manifest, list_folders, read_manifests, without_rows
from rankzero.run.directory import RunDirectory, new_claim
from rankzero.run.identity import Asked, Decision, describe
from rankzero.run.tries import PipelineTry
from rankzero.submit.existing import (
    Existing,
    assess,
    await_end,
    changes,
    check_owner,
    find_job_of,
    following,
)
from rankzero.values.pickled import Part

CLAIM_TIMEOUT = bounds.scaled(20.0)  # Least seconds until a submitter that has claimed a run without job.json is dead

logger = logging.getLogger(__name__)

Files = dict[str, list[Part]]
MakeJob = Callable[[int, int, int], Job]

_MOST_NAMED = 5
"""Most checkpoints that a line of the log names."""


def make(run: RunDirectory) -> None:
    """Makes a run directory before its first submission, for rows that Spark computes.

    Raises:
        InvalidJobError: the store cannot be written, or the directory belongs to another user or holds files that
            rankzero has not written.
    """
    with _storing(run):
        check_owner(run)
        _refuse_others(run)
        store.prove(os.path.dirname(run.directory))
        run.make()


def _refuse_others(run: RunDirectory) -> None:
    """Raises InvalidJobError for a directory with files that rankzero has not written, since it prunes and removes."""
    # Another submitter may make it meanwhile.
    if store.exists(run.directory) and not run.is_own() and (found := run.strangers()) and not run.is_own():
        raise InvalidJobError(
            f"{run.directory} holds files of others ({', '.join(sorted(found)[:_MOST_NAMED])}), so it cannot become a "
            "run directory: choose another run_id or another store"
        )


@contextlib.contextmanager
def _storing(run: RunDirectory) -> Iterator[None]:
    """Turns errors of the store in the block into InvalidJobError."""
    try:
        yield
    except InvalidJobError:
        raise
    except (OSError, ImportError, ValueError) as error:
        raise InvalidJobError(f"the store cannot be written: {run.directory}: {error}", code="RZ-1008") from error


Claim = enum.Enum("Claim", "NONE WON TAKEN VOID")
"""The claim of the number that a submitter has chosen, in `next_step`: not made, its own, another submitter's, void."""

Step = enum.Enum("Step", "AWAIT_END FOLLOW REFUSE CLAIM START WAIT PASS")
"""The next step of a submitter."""


def next_step(existing: Existing | None, claim: Claim) -> Step:
    """Decides what a submitter does next about the run under its id, and about the number that it has chosen.

    =====  =======  =========  ==============================================================
    Claim  Run      Step       Effect
    =====  =======  =========  ==============================================================
    NONE   none     CLAIM      claims the next number and writes the submission
    NONE   ending   AWAIT_END  waits for the end of the run, and assesses it again
    NONE   attach   FOLLOW     returns: the caller follows the run
    NONE   deliver  FOLLOW     returns: the caller fetches the result
    NONE   resume   CLAIM      claims the next number, and continues the training
    NONE   fresh    CLAIM      claims the next number, and begins from scratch
    NONE   other    REFUSE     raises InvalidJobError: another training is live
    WON    any      START      returns the job, for which the caller starts a driver
    TAKEN  any      WAIT       waits for another submitter, which has claimed this number or
                               counted this one as dead and claimed a later number
    VOID   any      PASS       chooses the next number: that submitter has died, takes too long
                               or has withdrawn its claim
    =====  =======  =========  ==============================================================
    """
    if claim is not Claim.NONE:
        return {Claim.WON: Step.START, Claim.TAKEN: Step.WAIT, Claim.VOID: Step.PASS}[claim]
    if existing is None:
        return Step.CLAIM
    if existing.ending:
        return Step.AWAIT_END
    if existing.decision in (Decision.ATTACH, Decision.DELIVER):
        return Step.FOLLOW
    return Step.CLAIM if existing.status.final else Step.REFUSE


def submit(
    run: RunDirectory,
    asked: Asked,
    make_job: MakeJob,
    files: Files,
    start_timeout: float = 0.0,
    caller: PipelineTry | None = None,
) -> Job | None:
    """Makes this the next submission of the run, unless the same training is live or its result undelivered.

    Args:
        run: The run's directory, which need not exist yet.
        asked: The requested training.
        make_job: Makes the job of a submission from its number, its first attempt and `Job.fresh_since`.
        files: The parts of each file, by name: payload, modules and their listing.
        start_timeout: Seconds for the driver to start on a cluster before its first heartbeat; 0 for the usual limit.
        caller: The pipeline step that submits the run, as for `assess`.

    Returns:
        The job, for which the caller must start a driver; None if it should attach to an existing run.

    Raises:
        InvalidJobError: the store cannot be written, or another training is live under this run id.
        EngineError: the run was cancelled and does not end.
    """
    claim, number, patience, job = Claim.NONE, 0, CLAIM_TIMEOUT(), None
    with _storing(run):
        while True:
            existing = assess(run, asked, caller) if claim is Claim.NONE else None
            step = next_step(existing, claim)
            if existing and step is not Step.AWAIT_END:
                _report_existing(run, existing, step, caller)
            if existing and step is Step.AWAIT_END:
                await_end(run, existing.job)
            elif step is Step.CLAIM:
                began = time.monotonic()
                claim, number, job = _claim(run, number, existing, make_job, files, start_timeout)
                if job and existing:
                    _report_earlier(run, existing, job, caller)
                # Another submitter may need as long for its files, and must not count as dead meanwhile.
                patience = max(patience, 2 * (time.monotonic() - began))
            elif step is Step.WAIT:
                claim = _await_submission(run, number, patience)
            elif step is Step.PASS:
                claim, number = Claim.NONE, number + 1
            else:
                return job


def _report_existing(run: RunDirectory, existing: Existing, step: Step, caller: PipelineTry | None) -> None:
    """Logs what becomes of an existing run, or raises InvalidJobError if its id is refused."""
    if step is Step.FOLLOW:
        if not caller:
            logger.warning("%s", following(existing, run.directory))
        if existing.job.owner and not existing.status.final:
            pid = existing.job.owner["pid"]
            logger.warning("the run ends with the process %s, which called run(), and not with this one", pid)
        if existing.decision is Decision.DELIVER:
            store.remove_unfinished(run.directory)
    elif step is Step.REFUSE:
        raise InvalidJobError(
            f"run_id {existing.job.run_id!r} is running another training (different: "
            f"{describe(existing.comparison.differing)}): cancel it with "
            f"RunHandle.attach({run.directory!r}).cancel(), or choose another run_id",
            code="RZ-1009",
        )


def _claim(
    run: RunDirectory,
    least: int,
    existing: Existing | None,
    make_job: MakeJob,
    files: Files,
    start_timeout: float,
) -> tuple[Claim, int, Job | None]:
    """Claims the next number, at least ``least``, and writes the submission.

    Returns:
        The claim, the number of the submission that counts, and its job if this submitter has written it.
    """
    if existing is None:
        _refuse_others(run)
    number = max(least, existing.job.submission + 1) if existing else least
    store.prove(os.path.dirname(run.directory))
    text = new_claim()
    with _releasing(run, number, text):
        if not run.claim(number, text):
            return Claim.TAKEN, number, None
        # Another user may have created the directory meanwhile.
        check_owner(run)
        store.remove_unfinished(run.directory)
        run.write_files(number, files)
        if (newest := run.newest_claim()) == number:
            job = _job_of(run, number, existing, make_job)
            is_written = run.write_submission(job, start_timeout)
            if (newest := run.newest_claim()) == number and is_written:
                return Claim.WON, number, job
        # This took so long that another submitter counted this one as dead and submitted the run.
        with contextlib.suppress(FileNotFoundError):
            run.restore(newest)
        return Claim.TAKEN, newest, None


def _job_of(run: RunDirectory, number: int, existing: Existing | None, make_job: MakeJob) -> Job:
    """Returns the job of a submission, which continues the training of the existing run if that is decided."""
    # Checkpoints of a run whose job was lost belong to another training.
    folders = list_folders(run)
    first_attempt = 1 + _last_attempt(run, folders)
    if existing is None:
        job = make_job(number, first_attempt, first_attempt)
        return replace(job, beginning="from scratch: it is the first submission under this id")
    first_attempt = max(1 + existing.status.attempt, first_attempt)
    fresh_since = first_attempt if existing.decision is Decision.FRESH else existing.job.fresh_since
    run.keep_outcome(existing.status)
    job = make_job(number, first_attempt, fresh_since)
    if existing.decision is not Decision.RESUME:
        return replace(job, beginning=_from_scratch(existing))
    found = [manifest for manifest in read_manifests(run, folders) if manifest.attempt >= fresh_since]
    usable = without_rows(run, found)
    place = f"checkpoint {usable[-1].id}" if usable else "its beginning, since no checkpoint counts"
    beginning = f"resumed from {place}; to start over, change code_version{changes(existing)}"
    return replace(job, beginning=beginning, metrics=_last_metrics(existing, found))


def _from_scratch(existing: Existing) -> str:
    """Returns `Job.beginning` of a submission behind an existing one that begins from scratch."""
    if existing.comparison.differing:
        return f"from scratch: other than before: {describe(existing.comparison.differing)}"
    if existing.status.state == "succeeded":
        return "from scratch: its result was delivered"
    return "from scratch: the result of the training before was delivered, and no checkpoint counts since"


@contextlib.contextmanager
def _releasing(run: RunDirectory, number: int, claim: bytes) -> Iterator[None]:
    """Removes a submission that the block could not complete, so that the next one does not wait for it.

    Args:
        run: The run's directory.
        number: Number of the submission.
        claim: The text of the claim, in case that another submitter has claimed it.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            if run.claim_text(number) == claim and _submission_of(run) < number:
                run.release(number)
        raise


def _report_earlier(run: RunDirectory, existing: Existing, job: Job, caller: PipelineTry | None) -> None:
    """Logs where a submission behind an earlier one begins, and which checkpoints stay unused."""
    if not caller:
        logger.warning("run %s: %s", run.directory, job.beginning)
    if existing.decision is Decision.FRESH and (left := list_folders(run)):
        names = ", ".join(left[-_MOST_NAMED:])
        logger.warning("the checkpoints of the training before stay until `rankzero gc` removes them: %s", names)


def _await_submission(run: RunDirectory, number: int, timeout: float) -> Claim:
    """Waits for another submitter to write ``job.json``; returns `Claim.VOID` if it does not, else `Claim.NONE`."""
    deadline = time.monotonic() + timeout
    claimant = run.claimant(number)
    who = f"process {claimant['pid']}" if claimant else "another process"
    logger.warning("waiting at most %.0f s for %s, which is submitting run %s", timeout, who, run.directory)
    while _submission_of(run) < number and run.is_claimed(number) and time.monotonic() < deadline:
        if claimant and is_gone(claimant):
            break
        time.sleep(bounds.POLL_INTERVAL_SHORT)
    return Claim.NONE if _submission_of(run) >= number else Claim.VOID


def _last_attempt(run: RunDirectory, folders: list[str]) -> int:
    """Returns the highest attempt that left checkpoints, rows or a value: the status may be older than those."""
    numbers = [name.partition("-")[0] for name in folders]
    numbers += store.list_names(run.path(TABLES))
    numbers += [name.removeprefix("value-").partition(".")[0] for name in store.list_names(run.path("result"))]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _last_metrics(existing: Existing, committed: list[Manifest]) -> dict[str, Any]:
    """Returns the last values of the metrics of a training that resumes from the last of these checkpoints.

    A driver that was killed may have committed checkpoints, from which the training resumes, and not written its last
    status. Such a checkpoint has the metrics of its report.
    """
    status, metrics, names = existing.status, dict(existing.status.metrics), [manifest.id for manifest in committed]
    for manifest in committed[names.index(status.checkpoint) + 1 if status.checkpoint in names else 0 :]:
        # Older ones come before what the status has: the last submission began with their metrics.
        if manifest.attempt >= existing.job.first_attempt:
            metrics |= manifest.metrics
    return metrics


def _submission_of(run: RunDirectory) -> int:
    job = find_job_of(run)
    return job.submission if job else -1


_RECORD_TIMEOUT = 4.0
"""Seconds in which a caller that was interrupted before its driver has begun records this in the store."""


@contextlib.contextmanager
def recording_end() -> Iterator[Written]:
    """Records the end of the submission that the block writes if the block ends before a driver has begun.

    Until its driver's first status, a run counts as living for as long as the process that has submitted it.

    Yields:
        The submission, which `rankzero.submit.prepare.prepare` fills in before it writes anything.
    """
    written, owner = Written(), os.getpid()
    try:
        yield written
    except BaseException as error:
        # A forked child that leaves the block has submitted nothing. A store may raise anything, and the exception of
        # the block must not be replaced.
        if written.run and os.getpid() == owner:
            with contextlib.suppress(Exception):
                # A store that does not answer must not keep a caller that was interrupted.
                recording = functools.partial(_record_end, written.run, written.nonce, error)
                in_thread(recording).result(_RECORD_TIMEOUT)
        raise


@dataclass
class Written:
    """A submission that is being written.

    Attributes:
        run: The run's directory; None before anything is written.
        nonce: `Job.nonce` of the submission.
    """

    run: RunDirectory | None = None
    nonce: str = ""


def _record_end(run: RunDirectory, nonce: str, error: BaseException) -> None:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, Exception):
        end: RankZeroError = EngineError(f"the driver could not be started: {what}")
    else:
        end = RunCancelledError(f"the caller was interrupted by {what} before the driver started")
    job, status = run.find_job(), run.status()
    is_ours = job is not None and job.nonce == nonce and status.driver_pid is None and not status.final
    # A driver process that has started nevertheless finds its role taken, and exits.
    if job is not None and is_ours and run.claim_driver(job.submission):
        state = "failed" if isinstance(end, EngineError) else "cancelled"
        run.write_status(replace(status, state=state, error=end.to_json(), ended=time.time()))
