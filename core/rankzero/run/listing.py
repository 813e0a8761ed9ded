"""`list_runs` lists the runs of a store, and `find_run` finds one by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rankzero import store
from rankzero.errors import RankZeroError, RunNotFoundError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.observer import STORE_PATIENCE, Observer
from rankzero.run.status import RunStatus

T = TypeVar("T")

LAST = "last"
"""The name of the run that was submitted last."""

UNKNOWN = "?"
"""The state of a run that cannot be read; the table shows it in place of every unknown fact, too."""

_UNREADABLE = (RankZeroError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NAMED = 5

READERS = 16
"""Runs of an object store that are read at the same time."""

JOBS = 4096
"""Most jobs that `list_runs` keeps in this process."""


@dataclass(frozen=True)
class Listed:
    """Describes a run of a store.

    Attributes:
        directory: The run directory.
        job: Job of the last submission.
        status: Status of the run; its state is ``"failed"`` if the driver has died.
        problem: Reason why the run cannot be read; job and status then have only its id and the state `UNKNOWN`.
    """

    directory: str
    job: Job
    status: RunStatus
    problem: str = ""


_jobs: dict[str, Job] = {}
"""Jobs by run directory. The job of a submission never changes, so another listing reads only its status."""


def list_runs(location: str | os.PathLike[str]) -> Iterator[Listed]:
    """Yields the runs of a store, in the order of their names.

    A run directory that cannot be read is a run with a problem. Directories of other programs are left out. A run on an
    object store takes three requests, and two if this process has listed the same submission before.

    Args:
        location: Root of the run directories, a path or an fsspec URL.

    Raises:
        FileNotFoundError: there is no such directory.
        InvalidJobError: the store cannot hold runs.
    """
    root = store.normalize(location)
    return (one for one in _each(root, names_of(root), _listed) if one)


def find_run(name: str) -> str:
    """Returns the directory of a run.

    Args:
        name: The directory, or the run's id, a part of it that no other id contains, or ``"last"``. A path or URL
            before the name, such as ``s3://bucket/runs/last``, is the store; else `store.root_of` names it.

    Raises:
        RunNotFoundError: no run or several runs have this name.
    """
    parent, _, part = name.rstrip("/").rpartition("/")
    if RunDirectory(name).is_own() or (parent and os.path.isdir(name)):
        return name
    root = store.normalize(store.root_of(parent))
    names = names_of(root)
    if part == LAST:
        created = (found for found in _each(root, names, _created) if found)
        if newest := max(created, default=None):
            return newest[1]
        raise RunNotFoundError(f"there is no run in {root}")
    found = [part] if part in names else [one for one in names if part in one]
    if len(found) == 1:
        return store.join(root, found[0])
    if found:
        shown = ", ".join(found[:_NAMED]) + (", ..." if found[_NAMED:] else "")
        raise RunNotFoundError(f"{len(found)} runs in {root} contain {part!r} in their ids: {shown}")
    raise RunNotFoundError(f"no run lives in {store.normalize(name)}, and no id in {root} contains {part!r}")


def names_of(root: str) -> list[str]:
    """Returns the names of the directories in a store that may be runs.

    Args:
        root: The store, normalized.

    Raises:
        FileNotFoundError: there is no such store, or nothing has been stored there yet.
    """
    names = [name for name in store.list_names(root) if not name.startswith(".")]
    if not names and (store.is_url(root) or not os.path.isdir(root)):
        raise FileNotFoundError(f"there is no store at {root}: no run was ever stored there, or its name is wrong")
    return names


def _each(root: str, names: list[str], read: Callable[[str], T]) -> Iterator[T]:
    """Yields what a function returns for each directory; on an object store several are read at the same time."""
    directories = [store.join(root, name) for name in names]
    if not store.is_url(root):
        yield from map(read, directories)
        return
    with ThreadPoolExecutor(READERS) as readers:
        yield from readers.map(read, directories)


def _listed(directory: str) -> Listed | None:
    """Returns a run, or None for a directory that is no run's, or whose submission is not written yet."""
    run = RunDirectory(directory)
    try:
        # An object store may fail for a moment; a file that cannot be read stays so.
        read = Observer(run.current, None).patiently if run.is_remote else _call
        if not (numbers := read(run.numbers)):
            return None
        if listed := _judged(run, _jobs.get(directory), numbers[-1], read):
            return listed
        job = read(lambda: run.job_of(numbers[-1]))
        if job and (directory in _jobs or len(_jobs) < JOBS):
            _jobs[directory] = job
        return _judged(run, job, numbers[-1], read)
    except _UNREADABLE as error:
        return _unreadable(run, error)


def _judged(run: RunDirectory, job: Job | None, number: int, read: Callable[..., Any]) -> Listed | None:
    if job is None or job.submission != number:
        return None
    own = Submission(run, job)
    try:
        status = read(own.status)
    except RunNotFoundError:
        if own.is_there():
            raise
        # It was removed, and submitted again under its name.
        return None
    return Listed(run.directory, job, Observer(lambda: own, None).judged(status, STORE_PATIENCE()))


def _call(read: Callable[[], T]) -> T:
    return read()


def _unreadable(run: RunDirectory, error: Exception) -> Listed | None:
    try:
        is_broken = run.find_job() is not None
    except _UNREADABLE:
        is_broken = _is_own(run)
    name = run.directory.rsplit("/", 1)[-1]
    job = Job(name, UNKNOWN, 0, 1, use_gpu=False, backend=None, timeout=None, start_timeout=0, engine={}, created=0)
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return Listed(run.directory, job, RunStatus(state=UNKNOWN), problem) if is_broken else None


def _is_own(run: RunDirectory) -> bool:
    try:
        return run.is_own()
    except _UNREADABLE:
        return False


def _created(directory: str) -> tuple[float, str] | None:
    try:
        job = RunDirectory(directory).find_job()
    except _UNREADABLE:
        return None
    return (job.created, directory) if job else None
