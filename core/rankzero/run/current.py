"""`CurrentStatus` reads the status of a directory's current submission and ignores what other drivers write there.

A directory that was removed and submitted again starts with submission 0. Until the driver of the removed run notices
the removal, it may write a status into the new directory. Each submission therefore has a nonce.
"""

from __future__ import annotations

import contextlib

from rankzero.errors import RunNotFoundError
from rankzero.run.directory import RunDirectory, RunStatus


class CurrentStatus:
    """Reads the status of a run for one reader, and ignores a status that another submission's driver wrote."""

    def __init__(self, run: RunDirectory) -> None:
        """Makes a reader; the first `read` accesses the store."""
        self._run = run
        self._accepted: RunStatus | None = None
        self._bound: tuple[int, str] | None = None

    def bind(self, submission: int, nonce: str) -> None:
        """Makes `read` raise if the directory now belongs to another run of the same name."""
        self._bound = (submission, nonce)

    def read(self) -> RunStatus:
        """Returns the status of the directory's last submission.

        Raises:
            RunNotFoundError: the directory holds no run, or another run than the one given to `bind`.
        """
        status = self._run.status()
        known = self._accepted
        if not status.nonce or (known and known.nonce == status.nonce):
            self._accepted = status
            return status
        job = self._run.job()
        if self._bound and job.submission == self._bound[0] and job.nonce != self._bound[1] != "" != job.nonce:
            raise RunNotFoundError(
                f"the run in {self._run.directory} was removed, and another one was submitted under its name"
            )
        # A submission's status is written before its job.
        is_being_written = status.submission > job.submission and self._run.is_claimed(status.submission)
        if job.nonce in ("", status.nonce) or is_being_written:
            self._accepted = status
            return status
        if known and known.nonce == job.nonce:
            return known
        return RunStatus(attempt=job.first_attempt, submission=job.submission, heartbeat=job.created, nonce=job.nonce)

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
        if nonce and run.job_of(submission).nonce != nonce:
            return False
    except RunNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        run.restore(submission)
        return True
    return False
