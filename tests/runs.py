"""Runs that no launcher has submitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rankzero.job import Job
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.status import RunStatus


def job(**facts: Any) -> Job:
    """The job of a run of one rank."""
    made = Job("run", "train", 1, 1, False, None, None, 60.0, {"kind": "local"})
    return replace(made, **facts)


def submitted(directory: str, status: RunStatus | None = None, **facts: Any) -> Submission:
    """Makes a submission, and writes the status of its driver."""
    run = RunDirectory(directory)
    own = Submission(run, job(run_id=run.directory.rsplit("/", 1)[-1], **facts))
    own.write_files({})
    assert run.claim(own.job)
    if status:
        own.write_status(replace(status, submission=own.job.submission))
        if status.final:
            own.finish(status)
    return own


def folder_of(directory: str | Path) -> Path:
    """The folder of the last submission of a run on a disk."""
    return Path(RunDirectory(str(directory)).current().directory)


def job_file(directory: str | Path) -> Path:
    """The job of the last submission of a run on a disk."""
    run = RunDirectory(str(directory))
    return Path(run.job_path(run.numbers()[-1]))


def lines_of(directory: str | Path) -> str:
    """The lines of the last submission of a run on a disk, as they are stored; empty before there are any."""
    if not RunDirectory(str(directory)).newest()[1]:
        return ""
    lines = folder_of(directory) / "lines"
    return lines.read_text() if lines.exists() else ""
