"""Retention: removes runs that ended long ago, and in those that stay what later submissions have replaced.

A collector takes the next number of a run for its removal, like a submitter, so that a removal and a submission of the
same run id exclude each other. With that there is no run; then its files are deleted. A collector may die at any time:
the next one continues. The file that took the number stays for `REMOVAL_CLAIM_TIMEOUT`, since a submitter that has
looked before it may still be writing its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field, replace

from rankzero import store
from rankzero.errors import RunNotFoundError
from rankzero.kinds import SECONDS
from rankzero.run.directory import DATASETS_FILE, SUBMISSIONS, RunDirectory, Submission
from rankzero.run.observer import Observer

REMOVAL_CLAIM_TIMEOUT = 3600.0  # Seconds for which a submission may be unwritten: the upload of its payload takes time

logger = logging.getLogger(__name__)

ABANDONED, HALF_REMOVED, REPLACED, TOMBSTONE = "abandoned", "half-removed", "replaced", "tombstone"
"""States of files without a run: begun but never submitted, left behind by a collector, of an earlier submission, or
only the file that took the number."""


@dataclass(frozen=True)
class Removed:
    """Describes what was removed, or would be: a run directory, or the folder of a submission."""

    directory: str
    state: str  # State of the run, or one of this module's
    since: float  # Unix time of its last activity


@dataclass(frozen=True)
class Collection:
    """The result of `collect`."""

    removed: list[Removed] = field(default_factory=list)  # In the order of the names of runs
    kept: int = 0  # Number of run directories that were kept
    problems: dict[str, str] = field(default_factory=dict)  # Errors of what could not be read or removed, by directory


def collect(
    location: str | os.PathLike[str], older_than: float, dry_run: bool = False, *, now: float | None = None
) -> Collection:
    """Removes the directories of runs that ended longer ago than ``older_than``.

    Removes runs that have ended, runs whose driver died, and directories in which a submission was begun but never
    made. A running run is kept, and so is everything in the store that is not a run. From a kept run, the files of
    submissions of that age are removed if the run was later submitted again from scratch. Collectors may run
    concurrently, die at any time, and meet submissions of the same run ids.

    Args:
        location: Root of the run directories, a path or an fsspec URL. It need not exist.
        older_than: Seconds for which a run is kept after its end, or the last heartbeat of a driver that died.
        dry_run: Removes nothing, and returns what would be removed.
        now: Unix time from which ages are measured; None is the current time.

    Returns:
        What was removed, and errors by directory, which do not stop the collection.

    Raises:
        InvalidJobError: ``older_than`` is not a positive number of seconds.
        OSError: the store cannot be listed (or an error of its fsspec driver).

    Example:
        >>> from rankzero.run.retention import collect
        >>> collect("runs", older_than=30 * 86400, dry_run=True).removed
        []
    """
    SECONDS.check("older_than", older_than)
    now = time.time() if now is None else now
    root = store.normalize(location)
    result, kept = Collection(), 0
    for name in store.list_names(root):
        directory = store.join(root, name)
        run = RunDirectory(directory)
        try:
            if (found := _inspect(run)) is None:
                continue
            state, since, last = found
            least = {TOMBSTONE: REMOVAL_CLAIM_TIMEOUT, ABANDONED: max(older_than, REMOVAL_CLAIM_TIMEOUT)}
            is_due = since is not None and now - since > least.get(state, older_than)
            if is_due and (dry_run or _remove(run, state, last)):
                result.removed.extend([] if state == TOMBSTONE else [Removed(directory, state, since or 0.0)])
                continue
            kept += state not in (HALF_REMOVED, TOMBSTONE)
            if state not in (ABANDONED, HALF_REMOVED, TOMBSTONE):
                result.removed.extend(_remove_replaced(run, now - older_than, dry_run))
        except Exception as error:
            with contextlib.suppress(Exception):
                if isinstance(error, (FileNotFoundError, RunNotFoundError)) and not run.names():
                    # Another collector was faster.
                    continue
            # Drivers of object stores raise their own types of exceptions.
            logger.debug("%s stays", directory, exc_info=True)
            result.problems[directory] = f"{type(error).__name__}: {error}"
    return replace(result, kept=kept)


def _inspect(run: RunDirectory) -> tuple[str, float | None, int] | None:
    """Returns the state of a directory, the Unix time of its last activity, and the number of its last submission.

    Returns None for a directory that is not a run's. The time is None while a process may write there.
    """
    if not run.is_remote and (os.path.islink(run.directory) or not os.path.isdir(run.directory)):
        return None
    if not (names := run.names()):
        return None
    number, job = run.newest()
    if job:
        status = Observer(Submission(run, job)).status()
        # A status that a power failure has emptied has no time.
        since = max(status.heartbeat, status.ended or 0.0) or job.created
        return status.state, since if status.final else None, number
    if number >= 0:
        old = [name for name in names if _number(name) <= number]
        if old != [f"{number}.json"] or store.list_names(run.directory) != [SUBMISSIONS]:
            return HALF_REMOVED, 0.0, number
        if names == old:
            return TOMBSTONE, store.modified(run.job_path(number)), number
    elif run.strangers():
        return None
    files = [run.path(SUBMISSIONS, name) for name in store.list_files(run.path(SUBMISSIONS))]
    # The removal takes the number of what was begun.
    return ABANDONED, max(map(store.modified, files), default=0.0), max(map(_number, names)) - 1


def _number(name: str) -> int:
    """Returns the number of a job, or of the folder of a submission."""
    return int(name.partition(".")[0].partition("-")[0])


def _remove(run: RunDirectory, state: str, last: int) -> bool:
    """Removes a run; False if another process was faster. Raises OSError (or an error of its fsspec driver)."""
    store.prove(os.path.dirname(run.directory))
    own = last
    if state not in (HALF_REMOVED, TOMBSTONE):
        if state != ABANDONED:
            # Its driver may only seem dead: from here on it stops. It may also have ended in another way by now.
            submission = run.current()
            status = Observer(submission).status()
            if not status.final or submission.finish(status).state != state:
                return False
        own += 1
        if not run.claim_removal(own):
            return False

    def left() -> list[str]:
        # Jobs first: a folder whose job is there is whole. A submitter may write the folder of the next number.
        old = [name for name in run.names() if _number(name) < own or (_number(name) == own and "-" in name)]
        return sorted(old, key=lambda name: "-" in name)

    for name in left():
        # Those of a submitter that writes the next number go on.
        store.abort_uploads(run.path(SUBMISSIONS, name))
        store.remove(run.path(SUBMISSIONS, name))
    for name in store.list_names(run.directory):
        if name != SUBMISSIONS:
            store.remove(run.path(name))
    if left():
        raise OSError(f"{run.directory} cannot be removed entirely: check the owner of its files")
    if state == TOMBSTONE:
        store.remove(run.job_path(own))
        # A submitter may have begun to write there.
        with contextlib.suppress(OSError):
            for folder in () if run.is_remote else (run.path(SUBMISSIONS), run.directory):
                os.rmdir(folder)
    return True


def _remove_replaced(run: RunDirectory, before: float, dry_run: bool) -> list[Removed]:
    """Removes the files of submissions of other trainings before the last one that ended before a Unix time.

    Their jobs stay, for `rankzero explain`. Garbage of submitters that lost their number goes, too, at any age.
    """
    own, removed = run.current(), list[Removed]()
    # The ranks may read rows that an earlier training has computed.
    rows = store.read_bytes(own.path(DATASETS_FILE)) if DATASETS_FILE in own.job.files else b""
    for name in run.names():
        if "." in name or name in own.job.earlier or name == own.name or f"/{name}/".encode() in rows:
            continue
        folder, owner = run.path(SUBMISSIONS, name), run.job_of(_number(name))
        if owner is None:
            # A submitter may be writing there.
            continue
        if name == f"{owner.submission}-{owner.nonce}":
            end = Submission(run, owner).end()
            if not end or (end.ended or 0.0) >= before:
                continue
            removed.append(Removed(folder, REPLACED, end.ended or 0.0))
        if not dry_run:
            store.remove(folder)
    return removed
