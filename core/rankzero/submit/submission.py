"""Submits a run id: exactly one submitter starts the run, and others attach to it.

A submitter writes the files of its submission into a folder that no other one has, then creates the job, which is the
claim of its number: of two submitters one wins, and the other looks again. One that dies before that leaves garbage.
After it and before the driver's first heartbeat, the run counts as one whose driver died, and the next submission
continues it. Before a run whose driver seems dead is replaced, its end is created: a driver that comes back finds it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankzero import store
from rankzero.errors import EngineError, InvalidJobError, RankZeroError, RunCancelledError
from rankzero.job import Job
from rankzero.run.checkpoints import Manifest, list_committed, list_folders, without_rows
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.identity import Decision, describe
from rankzero.submit.existing import Existing, await_end, changes, check_owner, following
from rankzero.threads import in_thread
from rankzero.values.pickled import Part

logger = logging.getLogger(__name__)

Files = Mapping[str, list[Part]]

_MOST_NAMED = 5
"""Most names that a message lists."""


def make(run: RunDirectory) -> None:
    """Checks that a run can be written, before anything is.

    Raises:
        InvalidJobError: the store cannot be written, or the directory belongs to another user or holds files that
            rankzero has not written.
    """
    with storing(run):
        check_owner(run)
        if store.exists(run.directory) and not run.is_own() and (found := run.strangers()):
            raise InvalidJobError(
                f"{run.directory} holds files of others ({', '.join(sorted(found)[:_MOST_NAMED])}), so it cannot "
                "become a run directory: choose another run_id or another store"
            )
        store.prove(os.path.dirname(run.directory))


@contextlib.contextmanager
def storing(run: RunDirectory) -> Iterator[None]:
    """Turns errors of the store in the block into InvalidJobError."""
    try:
        yield
    except InvalidJobError:
        raise
    except (OSError, ImportError, ValueError) as error:
        raise InvalidJobError(f"the store cannot be written: {run.directory}: {error}", code="RZ-1008") from error


Step = enum.Enum("Step", "AWAIT_END FOLLOW REFUSE REPLACE START")
"""The next step of a submitter."""


def next_step(existing: Existing | None, *, replaces: bool) -> Step:
    """Decides what a submitter does next about the run under its id.

    =======  =========  ==============================================================
    Run      Step       Effect
    =======  =========  ==============================================================
    none     START      claims the next number
    ending   AWAIT_END  waits for the end of the run, and looks again
    attach   FOLLOW     returns: the caller follows the run
    deliver  FOLLOW     returns: the caller fetches the result
    resume   START      claims the next number, and continues the training
    fresh    START      claims the next number, and begins from scratch
    other    REFUSE     raises InvalidJobError: another training is live
    other    REPLACE    for a pipeline step: ends the run, and looks again
    =======  =========  ==============================================================
    """
    if existing is None:
        return Step.START
    if existing.ending:
        return Step.AWAIT_END
    if existing.decision in (Decision.ATTACH, Decision.DELIVER):
        return Step.FOLLOW
    if existing.status.final:
        return Step.START
    return Step.REPLACE if replaces else Step.REFUSE


def settles(run: RunDirectory, existing: Existing | None, *, replaces: bool) -> Step | None:
    """Takes a submitter's next step, except to start or to follow, which it returns.

    Returns:
        `Step.START` or `Step.FOLLOW`; None if the run must be looked at again.

    Raises:
        InvalidJobError: another training is live under this run id.
        EngineError: the run was asked to stop and does not end.
    """
    step = next_step(existing, replaces=replaces)
    if existing is None:
        return step
    job = existing.job
    if step is Step.AWAIT_END:
        await_end(run, job)
        return None
    if step is Step.REPLACE:
        RunHandle[Any](run.directory, job=job).cancel(reason="another training was submitted in its place")
        await_end(run, job)
        what = describe(existing.comparison.differing)
        logger.warning("ended the run in %s: changed since: %s", run.directory, what)
        return None
    if step is Step.REFUSE:
        raise InvalidJobError(
            f"run_id {job.run_id!r} is running another training (different: "
            f"{describe(existing.comparison.differing)}): cancel it with "
            f"RunHandle.attach({run.directory!r}).cancel(), or choose another run_id",
            code="RZ-1009",
        )
    if step is Step.START:
        # Its driver may live although it seems dead. From here on it stops as soon as it looks.
        own = Submission(run, job)
        with contextlib.suppress(FileNotFoundError):
            if own.finish(existing.status).state == existing.status.state:
                return step
        return None
    if not replaces:
        logger.warning("%s", following(existing, run.directory))
    if job.owner and not existing.status.final:
        pid = job.owner["pid"]
        logger.warning("the run ends with the process %s, which called run(), and not with this one", pid)
    return step


def behind(run: RunDirectory, existing: Existing | None, job: Job) -> Job:
    """Returns the job of the next submission, which continues the training of the existing run if that is decided.

    Args:
        run: The run's directory.
        existing: The run as it is; None if there is none.
        job: The job, without the other fields that depend on the existing run.
    """
    if existing is None:
        return replace(job, beginning="from scratch: it is the first submission under this id")
    before = Submission(run, existing.job)
    places = [*before.earlier(), before.directory]
    attempts = [int(name.partition("-")[0]) for place in places for name in list_folders(place)]
    first_attempt = 1 + max([existing.status.attempt, *attempts])
    job = replace(job, first_attempt=first_attempt)
    if existing.decision is not Decision.RESUME:
        return replace(job, beginning=_from_scratch(existing))
    found = list_committed(places)
    usable = without_rows(found)
    place = f"checkpoint {usable[-1].id}" if usable else "its beginning, since no checkpoint counts"
    beginning = f"resumed from {place}; to start over, change code_version{changes(existing)}"
    earlier = [*before.job.earlier, before.name]
    return replace(job, beginning=beginning, earlier=earlier, metrics=_last_metrics(existing, found))


def claim(own: Submission, files: Files) -> bool:
    """Writes the files of a submission and then claims its number; False if another process was faster.

    Raises:
        InvalidJobError: the store cannot be written.
    """
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
            if own.run.is_own() and store.exists(own.directory):
                raise
        except BaseException:
            with contextlib.suppress(Exception):
                # An exception of a signal handler may come behind the claim: the submission gets its end then.
                if not own.is_there():
                    store.remove(own.directory)
            raise
        store.remove(own.directory)
        return False


def _from_scratch(existing: Existing) -> str:
    """Returns `Job.beginning` of a submission behind an existing one that begins from scratch."""
    if existing.comparison.differing:
        return f"from scratch: other than before: {describe(existing.comparison.differing)}"
    if existing.status.state == "succeeded":
        return "from scratch: its result was delivered"
    return "from scratch: the result of the training before was delivered, and no checkpoint counts since"


def report_beginning(existing: Existing, own: Submission, *, is_quiet: bool) -> None:
    """Logs where a submission behind an earlier one begins, and which checkpoints stay unused."""
    if not is_quiet:
        logger.warning("run %s: %s", own.run.directory, own.job.beginning)
    before = Submission(own.run, existing.job)
    places = [*before.earlier(), before.directory]
    if not own.job.earlier and (left := [name for place in places for name in list_folders(place)]):
        names = ", ".join(left[-_MOST_NAMED:])
        logger.warning("the checkpoints of the training before stay until `rankzero gc` removes them: %s", names)


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


_RECORD_TIMEOUT = 4.0
"""Seconds in which a caller that was interrupted before its driver has begun records this in the store."""


@dataclass
class Written:
    """The submission that is being started; None before it is claimed."""

    own: Submission | None = None


@contextlib.contextmanager
def recording_end() -> Iterator[Written]:
    """Records the end of the submission that the block makes if the block ends before a driver has begun.

    Until its driver's first status, a run counts as living for as long as the process that has submitted it.

    Yields:
        The submission, which `rankzero.submit.prepare.prepare` fills in before it claims anything.
    """
    written, owner = Written(), os.getpid()
    try:
        yield written
    except BaseException as error:
        # A forked child that leaves the block has submitted nothing. A store may raise anything, and the exception of
        # the block must not be replaced.
        if written.own and os.getpid() == owner:
            with contextlib.suppress(Exception):
                # A store that does not answer must not keep a caller that was interrupted.
                in_thread(functools.partial(_record_end, written.own, error)).result(_RECORD_TIMEOUT)
        raise


def _record_end(own: Submission, error: BaseException) -> None:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    end: RankZeroError = EngineError(f"the driver could not be started: {what}")
    if not isinstance(error, Exception):
        end = RunCancelledError(f"the caller was interrupted by {what} before the driver started")
    if own.is_there() and (status := own.status()).driver_pid is None and not status.final:
        # A driver process that has started nevertheless finds the end, and exits.
        state = "failed" if isinstance(end, EngineError) else "cancelled"
        own.finish(replace(status, state=state, error=end.to_json()))
