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
import re
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rankzero import store
from rankzero.errors import RunNotFoundError
from rankzero.kinds import SECONDS
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.handle import RunHandle
from rankzero.run.names import CLAIM, FOLDER, SUBMISSIONS

REMOVAL_CLAIM_TIMEOUT = 3600.0  # Seconds for which a submission may be unwritten: the upload of its payload takes time

logger = logging.getLogger(__name__)

ABANDONED, HALF_REMOVED, UNREADABLE = "abandoned", "half-removed", "unreadable"
"""States of a directory without a run: begun but never submitted, left behind by a collector, or damaged."""


@dataclass(frozen=True)
class Age:
    """The facts that decide whether a directory is removed.

    Attributes:
        state: State of the run, ``"failed"`` if its driver died; or `ABANDONED`, `HALF_REMOVED` or `UNREADABLE`.
        final: True if no process writes there any more.
        since: Unix time of the last activity: the end, or the last heartbeat if that came later.
        problem: Reason why an `UNREADABLE` run cannot be read.
        is_empty: True for a `HALF_REMOVED` run of which only the claim of its removal is left.
    """

    state: str
    final: bool
    since: float
    problem: str = ""
    is_empty: bool = False


def is_due(age: Age, now: float, older_than: float) -> bool:
    """Returns True if a directory should be removed.

    Args:
        age: The facts about the directory.
        now: Unix time.
        older_than: Seconds for which a run is kept after its last activity.
    """
    if age.state == HALF_REMOVED:
        return not age.is_empty or now - age.since > REMOVAL_CLAIM_TIMEOUT
    if age.state == ABANDONED:
        return now - age.since > max(older_than, REMOVAL_CLAIM_TIMEOUT)
    return age.final and now - age.since > older_than


@dataclass(frozen=True)
class Removed:
    """A run directory that was removed, or that a dry run would remove.

    Attributes:
        directory: Location of the directory.
        state: State of the run; ``"abandoned"`` if it was claimed but never written, ``"half-removed"`` if an
            earlier removal died.
        size: Size of its files in bytes.
        since: Unix time of its last activity.
    """

    directory: str
    state: str
    size: int
    since: float


REPLACED = "replaced"
"""State of the files of a submission that a later one has replaced."""


@dataclass(frozen=True)
class Collection:
    """The result of `collect`.

    Attributes:
        removed: The removed directories, in the order of their names.
        kept: Number of run directories that were kept.
        problems: Error messages of directories that could not be read or removed, by directory.
        dry_run: True if no directory was removed.
        replaced: The files of submissions that were removed from run directories that were kept: the run was later
            submitted again from scratch.
    """

    removed: list[Removed] = field(default_factory=list)
    kept: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    replaced: list[Removed] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Returns the size in bytes of everything that was removed, or that a dry run would remove."""
        return sum(removed.size for removed in [*self.removed, *self.replaced])

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values, with the total ``size``, for a log or an XCom."""
        return {**asdict(self), "size": self.size}


def collect(
    location: str | os.PathLike[str], older_than: float, dry_run: bool = False, *, now: float | None = None
) -> Collection:
    """Removes the directories of runs that ended longer ago than ``older_than``.

    Removes runs that have ended, runs whose driver died, run directories that cannot be read and in which no file
    changes, and directories in which a submission was begun but never made. A running run is kept, however old it is,
    and so is everything in the store that is not a run. From a kept run, the files of submissions of that age are
    removed if the run was later submitted again from scratch.

    The logs, checkpoints and result of a run are removed with its directory, so a `rankzero.ResultRef` of the run
    cannot be loaded any more. To keep a result longer, copy it: ``ResultRef.save(ref.load(), directory)``.

    Collectors may run concurrently, die at any time, and meet submissions of the same run ids. Of a removed run one
    small file stays for an hour.

    Args:
        location: Root of the run directories, a path or an fsspec URL. It need not exist.
        older_than: Seconds for which a run is kept after its end; for one whose driver died, after its
            last heartbeat.
        dry_run: Removes nothing, and returns what would be removed.
        now: Unix time from which ages are measured; None is the current time.

    Returns:
        The removed directories, and the errors of others. An error in one directory does not stop the collection.

    Raises:
        InvalidJobError: ``older_than`` is not a positive number of seconds.
        OSError: the store cannot be listed (or an error of its fsspec driver).

    Example:
        >>> from rankzero.run.retention import collect
        >>> collect("runs", older_than=30 * 86400, dry_run=True).size
        0
    """
    SECONDS.check("older_than", older_than)
    now = time.time() if now is None else now
    root = store.normalize(location)
    found = Collection(dry_run=dry_run)
    kept = 0
    for name in store.list_names(root):
        directory = store.join(root, name)
        try:
            if (age := _inspect(directory)) is None:
                continue
            run = RunDirectory(directory)
            if is_due(age, now, older_than):
                size = store.tree_size(directory)
                if dry_run or _remove(run, age):
                    found.removed.extend([] if age.is_empty else [Removed(directory, age.state, size, age.since)])
                    continue
            kept += age.state != HALF_REMOVED
            if age.problem:
                found.problems[directory] = age.problem
            elif age.state not in (ABANDONED, HALF_REMOVED):
                found.replaced.extend(_remove_replaced(run, now - older_than, dry_run))
        except Exception as error:
            if isinstance(error, (FileNotFoundError, RunNotFoundError)) and not _is_run(directory):
                continue
            # Drivers of object stores raise their own types of exceptions.
            logger.debug("%s stays", directory, exc_info=True)
            found.problems[directory] = f"{type(error).__name__}: {error}"
    return replace(found, kept=kept)


def _is_run(directory: str) -> bool:
    with contextlib.suppress(Exception):
        return RunDirectory(directory).is_own()
    return True


def _remove_replaced(run: RunDirectory, before: float, dry_run: bool) -> list[Removed]:
    """Removes the files of submissions of other trainings before the last one that ended before a Unix time.

    Their jobs stay, for `rankzero explain`. Garbage of submitters that lost their number goes, too, at any age.
    """
    last, removed = run.job(), list[Removed]()
    for name in run.names():
        if CLAIM.fullmatch(name) or name in last.earlier or name == f"{last.submission}-{last.nonce}":
            continue
        folder = run.path(SUBMISSIONS, name)
        owner = run.job_of(int(name.partition("-")[0]))
        if owner is None:
            # A submitter may be writing there.
            continue
        if name != f"{owner.submission}-{owner.nonce}":
            if not dry_run:
                store.remove(folder)
            continue
        end = Submission(run, owner).end()
        if owner.submission < last.submission and end and (end.ended or 0.0) < before:
            removed.append(Removed(folder, REPLACED, store.tree_size(folder), end.ended or 0.0))
            if not dry_run:
                store.remove(folder)
    return removed


def _inspect(directory: str) -> Age | None:
    """Returns the age of a directory; None if it is not a run directory. Raises what the store raises."""
    if not store.is_url(directory) and (os.path.islink(directory) or not os.path.isdir(directory)):
        return None
    run = RunDirectory(directory)
    names = run.names()
    if not names:
        return None
    try:
        number, job = run.newest()
        if job:
            # The handle also determines whether the driver lives.
            status = RunHandle[Any](directory, job=job, follows=False).status()
            return Age(status.state, status.final, max(status.heartbeat, status.ended or 0.0))
    except RunNotFoundError as error:
        if not run.names():
            raise
        # A driver of another version of rankzero would write its files, too.
        since = max(map(store.modified, map(run.path, store.list_files(directory))))
        return Age(UNREADABLE, True, since, f"{type(error).__name__}: {error}")
    if number >= 0:
        is_empty = names == [f"{number}.json"] and store.list_names(directory) == [SUBMISSIONS]
        return Age(HALF_REMOVED, True, store.modified(run.job_path(number)), is_empty=is_empty)
    if run.strangers():
        return None
    files = [run.path(SUBMISSIONS, name) for name in store.list_files(run.path(SUBMISSIONS))]
    return Age(ABANDONED, True, max(map(store.modified, files), default=0.0))


def _remove(run: RunDirectory, age: Age) -> bool:
    """Removes a run; False if another process was faster. Raises OSError (or an error of its fsspec driver)."""
    store.prove(os.path.dirname(run.directory))
    number = run.numbers()[-1:] or [_least(run) - 1]
    own = number[0]
    if age.state != HALF_REMOVED:
        if age.state not in (ABANDONED, UNREADABLE) and not _ended(run, age):
            return False
        own += 1
        if not run.claim_removal(own):
            return False
    # Jobs first: a folder whose job is there is whole.
    for name in sorted(_of(run, own), key=lambda name: FOLDER.match(name) is not None):
        store.remove(run.path(SUBMISSIONS, name))
    for name in store.list_names(run.directory):
        if name != SUBMISSIONS:
            store.remove(run.path(name))
    store.abort_uploads(run.path(""))
    if _of(run, own):
        raise OSError(f"{run.directory} cannot be removed entirely: check the owner of its files")
    if age.is_empty:
        store.remove(run.job_path(own))
        # A submitter may have begun to write there.
        with contextlib.suppress(OSError):
            for folder in () if run.is_remote else (run.path(SUBMISSIONS), run.directory):
                os.rmdir(folder)
    return True


def _of(run: RunDirectory, removal: int) -> list[str]:
    """Returns the names of jobs and folders that a removal with this number removes."""
    numbers = {name: int(re.split("[.-]", name)[0]) for name in run.names()}
    return [name for name, number in numbers.items() if number < removal or (number == removal and "-" in name)]


def _least(run: RunDirectory) -> int:
    """Returns the number of a submission that was begun in a directory without one, and never made."""
    return max((int(found[1]) for name in run.names() if (found := FOLDER.match(name))), default=0)


def _ended(run: RunDirectory, age: Age) -> bool:
    """Ends the last submission, whose driver may only seem dead; False if it has ended in another way by now."""
    job = run.job()
    status = RunHandle[Any](run.directory, job=job, follows=False).status()
    own = Submission(run, job)
    return status.final and own.finish(status).state == age.state
