"""`CurrentStatus` reads the status of one submission of a directory and ignores what other drivers write there.

A directory that was removed and submitted again starts with submission 0. Until the driver of the removed run notices
the removal, it may write a status into the new directory. Each submission therefore has a nonce.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankzero.errors import EngineError, RunCancelledError, RunNotFoundError
from rankzero.host.processes import process_namespace, process_state
from rankzero.run.directory import RunDirectory
from rankzero.run.status import RunStatus


class CurrentStatus:
    """Reads, or cancels, one submission of a run; ignores a status that another submission's driver wrote."""

    def __init__(self, run: RunDirectory) -> None:
        """Makes a reader; the first `read` accesses the store."""
        self._run = run
        self._accepted: RunStatus | None = None
        self._bound: tuple[int, str] | None = None

    def bind(self, submission: int, nonce: str) -> None:
        """Makes `read` follow this submission, and raise if the directory now belongs to another run of its name."""
        self._bound = (submission, nonce)

    @property
    def submission(self) -> int:
        """Returns the number given to `bind`, else binds to the directory's last submission. Raises like `read`."""
        # Not a cached_property: in Python 3.11 a store that does not answer would hold its lock for all handles.
        if self._bound is None:
            job = self._run.job()
            last = (job.submission, job.nonce)
            # A submission's status may be written before its job.
            with contextlib.suppress(RunNotFoundError):
                status = self.read()
                if status.submission > job.submission:
                    last = (status.submission, status.nonce)
            self._bound = last
        return self._bound[0]

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

    def cancel(self, receiver: Mapping[str, Any] | None) -> None:
        """Requests the end of `submission`, as `RunHandle.cancel` describes."""
        status = self.read()
        if status.final or status.submission > self.submission:
            return
        self._run.request_cancel(self.submission, receiver)
        if status.driver_pid is None and self._is_for_a_cluster() and self._run.claim_driver(self.submission):
            # If the cluster starts the driver later, it finds the submission claimed and exits.
            error = RunCancelledError("the run was cancelled before its driver started", requested=True)
            ended = replace(status, state="cancelled", error=error.to_json(), ended=time.time())
            self._run.write_status(ended)
        elif self._run.is_remote:
            self._wake_driver(status)

    def _is_for_a_cluster(self) -> bool:
        """Returns True if a cluster starts the driver of this submission, possibly much later."""
        job = self._run.job()
        return job.submission == self.submission and "deploy_mode" in job.engine

    def _wake_driver(self, status: RunStatus) -> None:
        """Signals the driver of a submitted run if it is on this machine, since it polls an object store seldom."""
        pid, job = status.driver_pid, self._run.job()
        is_own = status.submission == self.submission == job.submission and job.owner is None
        is_here = status.driver_namespace == process_namespace()
        if pid and is_own and is_here and process_state(pid, status.driver_start):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)


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
