"""`list_runs` lists the runs of a store, and `find_run` finds one by its name."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from rankzero import store
from rankzero.errors import RankZeroError, RunNotFoundError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.observer import Observer
from rankzero.run.status import RunStatus

T = TypeVar("T")

logger = logging.getLogger(__name__)

LAST = "last"  # The name of the run that was submitted last
READERS = 16  # Runs of an object store that are read at the same time
JOBS = 65536  # Most jobs that `list_runs` keeps, so that another listing reads only the status of a run

_UNREADABLE = (RankZeroError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NAMED = 5


class Listed(NamedTuple):
    """A run of a store."""

    directory: str
    job: Job  # Of the last submission
    status: RunStatus  # Its state is failed if the driver has died


def list_runs(location: str | os.PathLike[str]) -> Iterator[Listed]:
    """Yields the runs of a store, in the order of their names.

    A run directory that cannot be read is left out, with a warning; so are directories of other programs. A run on an
    object store takes three requests, and two if this process has listed the same submission before.

    Args:
        location: Root of the run directories, a path or an fsspec URL.

    Raises:
        FileNotFoundError: there is no such directory.
        InvalidJobError: the store cannot hold runs.
    """
    root = store.normalize(location)
    return _each(root, names_of(root), _listed)


def find_run(name: str) -> str:
    """Returns the directory of a run.

    Args:
        name: The directory, or the run's id, a part of it that no other id contains, or ``"last"``. A path or URL
            before the name, such as ``s3://bucket/runs/last``, is the store; else `store.root_of` names it.

    Raises:
        RunNotFoundError: no run or several runs have this name.
    """
    parent, _, part = name.rstrip("/").rpartition("/")
    if RunDirectory(name).names() or (parent and os.path.isdir(name)):
        return name
    root = store.normalize(store.root_of(parent))
    names = names_of(root)
    if part == LAST:
        if newest := max(_each(root, names, _created), default=None):
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
    """Returns the names of the directories in a store that may be runs. Raises FileNotFoundError if it is not there."""
    names = [name for name in store.list_names(root) if not name.startswith(".")]
    if not names and (store.is_url(root) or not os.path.isdir(root)):
        raise FileNotFoundError(f"there is no store at {root}: no run was ever stored there, or its name is wrong")
    return names


def _each(root: str, names: list[str], read: Callable[[str], T | None]) -> Iterator[T]:
    """Yields what a function returns for each directory, unless that is None; on an object store several at a time."""
    directories = [store.join(root, name) for name in names]
    if not store.is_url(root):
        yield from (found for found in map(read, directories) if found)
        return
    with ThreadPoolExecutor(READERS) as readers:
        yield from (found for found in readers.map(read, directories) if found)


def _listed(directory: str) -> Listed | None:
    """Returns a run, or None for a directory that is no run's, or whose submission is not written yet."""
    run = RunDirectory(directory)
    try:
        if not (job := _job(directory, tuple(run.names()))):
            return None
        own = Submission(run, job)
        return Listed(run.directory, job, Observer(own).judged(own.status()))
    except _UNREADABLE as error:
        logger.warning(
            "the run in %s cannot be read: %s", directory, f"{type(error).__name__}: {error}".splitlines()[0]
        )
        return None


@functools.lru_cache(JOBS)
def _job(directory: str, names: tuple[str, ...]) -> Job | None:
    """Returns the last job, which never changes while the names of all jobs and folders stay the same."""
    number = max((int(name.partition(".")[0]) for name in names if "." in name), default=-1)
    return RunDirectory(directory).job_of(number)


def _created(directory: str) -> tuple[float, str] | None:
    try:
        job = RunDirectory(directory).newest()[1]
    except _UNREADABLE:
        return None
    return (job.created, directory) if job else None
