"""`CurrentStatus`: the status of the submission that a run directory holds, whoever else may still write there.

A directory that was removed and submitted again begins with submission 0 again. Until the driver of the removed run
notices that, it may write a status into the new directory. Submissions therefore have a nonce each.
"""

from __future__ import annotations

import contextlib

from rankzero.errors import RunNotFoundError
from rankzero.run.directory import RunDirectory, RunStatus


class CurrentStatus:
    """Reads the status of a run for one reader, and leaves out what drivers of other submissions wrote."""

    def __init__(self, run: RunDirectory) -> None:
        """Reads nothing."""
        self._run = run
        self._accepted: RunStatus | None = None
        self._bound: tuple[int, str] | None = None

    def bind(self, submission: int, nonce: str) -> None:
        """Has `read` raise once the directory belongs to another run, which has the same name."""
        self._bound = (submission, nonce)

    def read(self) -> RunStatus:
        """Returns the status of the directory's last submission.

        Raises:
            RunNotFoundError: no run lives there, or another one than that of `bind`.
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
        # Of a submission that is being written there is a status first.
        is_being_written = status.submission > job.submission and self._run.is_claimed(status.submission)
        if job.nonce in ("", status.nonce) or is_being_written:
            self._accepted = status
            return status
        if known and known.nonce == job.nonce:
            return known
        return RunStatus(attempt=job.first_attempt, submission=job.submission, heartbeat=job.created, nonce=job.nonce)


def owns(run: RunDirectory, submission: int, nonce: str) -> bool:
    """Returns True if a run directory still belongs to this submission, so that its driver may write there.

    Puts the submission's ``job.json`` back if a submitter that was held up has written an older one over it.

    Args:
        run: The run directory.
        submission: Number of the driver's submission.
        nonce: `Job.nonce` of it.

    Raises:
        OSError: the store cannot be read (or an error of its fsspec driver).
    """
    try:
        current = run.job()
        if current.submission > submission:
            return False
        if current.submission == submission and current.nonce in ("", nonce):
            return True
        # Of a directory that was removed nothing of this submission is left.
        if nonce and run.job_of(submission).nonce != nonce:
            return False
    except RunNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        run.restore(submission)
        return True
    return False
