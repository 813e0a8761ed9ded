"""`CurrentStatus` reads the status of one submission of a directory and ignores what other drivers write there.

A directory that was removed and submitted again starts with submission 0. Until the driver of the removed run notices
the removal, it may write a status into the new directory. Each submission therefore has a nonce.
"""

from __future__ import annotations

import contextlib

from rankzero.errors import EngineError, RunNotFoundError
from rankzero.run.directory import RunDirectory
from rankzero.run.status import RunStatus


class CurrentStatus:
    """Reads the status of a run for one reader, and ignores a status that another submission's driver wrote."""

    def __init__(self, run: RunDirectory) -> None:
        """Makes a reader; the first `read` accesses the store."""
        self._run = run
        self._accepted: RunStatus | None = None
        self._bound: tuple[int, str] | None = None

    def bind(self, submission: int, nonce: str) -> None:
        """Makes `read` follow this submission, and raise if the directory now belongs to another run of its name."""
        self._bound = (submission, nonce)

    def read(self) -> RunStatus:
        """Returns the status of the submission given to `bind`, else of the directory's last submission.

        Raises:
            RunNotFoundError: the directory holds no run, or another run than the one given to `bind`.
        """
        status = self._run.status()
        known = self._accepted
        if not status.nonce or (known and known.nonce == status.nonce):
            self._accepted = status
            return status
        job = self._run.job()
        # A submission's status is written before its job, which makes it the last one. A submitter that was delayed may
        # have written an older job over that of a submission which has its driver.
        is_later = status.submission > job.submission and status.driver_pid is not None
        if self._bound:
            submission, nonce = self._bound
            if job.submission == submission and job.nonce != nonce != "" != job.nonce:
                raise self._removed()
            if max(job.submission, status.submission if is_later else 0) > submission:
                self._accepted = self._end_of(submission, nonce)
                return self._accepted
        if job.nonce in ("", status.nonce) or is_later:
            self._accepted = status
            return status
        if (found := self._run.outcome(job.submission)) and found.nonce == job.nonce:
            return found
        if known and known.nonce == job.nonce:
            return known
        return RunStatus(attempt=job.first_attempt, submission=job.submission, heartbeat=job.created, nonce=job.nonce)

    def _end_of(self, submission: int, nonce: str) -> RunStatus:
        """Returns how a submission ended that was followed by a later one."""
        if (found := self._run.outcome(submission)) and found.nonce == nonce:
            return found
        job = self._run.job_of(submission)
        if not (job and job.nonce in ("", nonce)):
            raise self._removed()
        text = f"submission {submission} of {self._run.directory} was followed by a later one, and its end is unknown"
        return RunStatus("failed", submission=submission, nonce=nonce, error=EngineError(text).to_json())

    def _removed(self) -> RunNotFoundError:
        return RunNotFoundError(
            f"the run in {self._run.directory} was removed, and another one was submitted under its name"
        )

    def outcome(self, status: RunStatus) -> RunStatus:
        """Returns the recorded outcome if a late write has replaced it by this status; else the status itself."""
        found = None if status.certain else self._run.outcome(status.submission)
        return found if found and found.nonce == status.nonce else status


def owns(run: RunDirectory, submission: int, nonce: str) -> bool:
    """Returns True if a run directory still belongs to this submission, so that its driver may write there.

    Restores the submission's ``job.json`` if a delayed submitter has overwritten it with an older one.

    Args:
        run: The run directory.
        submission: Number of the driver's submission.
        nonce: `Job.nonce` of the driver's submission.

    Raises:
        OSError: the store cannot be read (or an error of its fsspec driver).
    """
    try:
        current = run.job()
        if current.submission > submission:
            return False
        if current.submission == submission and current.nonce in ("", nonce):
            return True
        # A removed directory has lost this submission's job, or has the job of another run.
        own = run.job_of(submission)
        if nonce and not (own and own.nonce == nonce):
            return False
    except RunNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        run.restore(submission)
        return True
    return False
