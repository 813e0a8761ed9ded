"""Retention: removes the directories of runs that ended long ago.

A collector first claims the next submission of a run, like a submitter, so that a removal and a submission of the same
run id exclude each other. The newest claim wins: a removal that finds a newer claim stops.

A collector may die at any time. On a local disk, it first renames the directory to a hidden name, which removes the
run in one step; the next `collect` deletes hidden directories. An object store cannot rename, so ``job.json`` is
deleted first, and without it there is no run. The next `collect` finds the claim of the dead collector and continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero import store
from rankzero.errors import RunNotFoundError
from rankzero.kinds import SECONDS
from rankzero.run.checkpoints import FOLDER, list_committed, remove
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.names import DATASETS

REMOVAL_CLAIM_TIMEOUT = 3600.0  # Seconds for which a submission may be unwritten: the upload of its payload takes time

logger = logging.getLogger(__name__)

HIDDEN = ".rankzero-removed-"
"""Prefix of the names of directories that are being removed. A run id never begins with a dot."""

ABANDONED, HALF_REMOVED, UNREADABLE = "abandoned", "half-removed", "unreadable"
"""States of a directory without a run: claimed but never written, left behind by a collector that died, or damaged."""


@dataclass(frozen=True)
class Age:
    """The facts that decide whether a directory is removed.

    Attributes:
        state: State of the run, ``"failed"`` if its driver died; or `ABANDONED`, `HALF_REMOVED` or `UNREADABLE`.
        final: True if no process writes there any more.
        since: Unix time of the last activity: the end, or the last heartbeat if that came later.
        claimed: Unix time of a claim whose submission is not written; None if there is no such claim.
        problem: Reason why an `UNREADABLE` run cannot be read.
    """

    state: str
    final: bool
    since: float
    claimed: float | None = None
    problem: str = ""


def is_due(age: Age, now: float, older_than: float) -> bool:
    """Returns True if a directory should be removed.

    Args:
        age: The facts about the directory.
        now: Unix time.
        older_than: Seconds for which a run is kept after its last activity.
    """
    if age.state == HALF_REMOVED:
        return True
    if age.claimed is not None and now - age.claimed <= max(older_than, REMOVAL_CLAIM_TIMEOUT):
        return False
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


EARLIER = "earlier"
"""State of checkpoints of a run that was later submitted from scratch."""


@dataclass(frozen=True)
class Collection:
    """The result of `collect`.

    Attributes:
        removed: The removed directories, in the order of their names.
        kept: Number of run directories that were kept.
        problems: Error messages of directories that could not be read or removed, by directory.
        dry_run: True if no directory was removed.
        checkpoints: Checkpoints that were removed from run directories that were kept: their run was later submitted
            again from scratch.
    """

    removed: list[Removed] = field(default_factory=list)
    kept: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    checkpoints: list[Removed] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Returns the size in bytes of everything that was removed, or that a dry run would remove."""
        return sum(removed.size for removed in [*self.removed, *self.checkpoints])

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values, with the total ``size``, for a log or an XCom."""
        return {**asdict(self), "size": self.size}


def collect(
    location: str | os.PathLike[str], older_than: float, dry_run: bool = False, *, now: float | None = None
) -> Collection:
    """Removes the directories of runs that ended longer ago than ``older_than``.

    Removes runs that have ended, runs whose driver died, run directories that cannot be read and in which no file
    changes, and directories that were claimed for a run but never written. A running run is kept, however old it is,
    and so is everything in the store that is not a run. From a kept run,
    checkpoints of that age are removed if an earlier training under the same run id reported them.

    The logs, checkpoints and result of a run are removed with its directory, so a `rankzero.ResultRef` of the run
    cannot be loaded any more. To keep a result longer, copy it: ``ResultRef.save(ref.load(), directory)``.

    Collectors may run concurrently, die at any time, and meet submissions of the same run ids. On a local disk a run
    is removed in one step. On an object store, a submission waits up to 20 s for a removal. A removal that takes longer
    stops when it finds the submission, and the new run may then find checkpoints of the old one.

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
    removed: list[Removed] = []
    checkpoints: list[Removed] = []
    problems: dict[str, str] = {}
    kept = 0
    for name in store.list_names(root):
        directory = store.join(root, name)
        try:
            found = _inspect(directory)
            if found is None:
                continue
            newest, age = found
            if is_due(age, now, older_than):
                size = store.tree_size(directory)
                if dry_run or _remove(RunDirectory(directory), newest, age):
                    removed.append(Removed(directory, age.state, size, age.since))
                    continue
            kept += 1
            if age.problem:
                problems[directory] = age.problem
            elif age.state not in (ABANDONED, HALF_REMOVED):
                checkpoints += _remove_earlier(RunDirectory(directory), now - older_than, dry_run)
        except Exception as error:
            if isinstance(error, (FileNotFoundError, RunNotFoundError)) and _has_gone(directory):
                continue
            # Drivers of object stores raise their own types of exceptions.
            logger.debug("%s stays", directory, exc_info=True)
            problems[directory] = f"{type(error).__name__}: {error}"
    return Collection(removed, kept, problems, dry_run, checkpoints)


def _remove_earlier(run: RunDirectory, before: float, dry_run: bool) -> list[Removed]:
    """Removes checkpoints of earlier trainings with the same run id that are older than a Unix time."""
    job = run.job()
    removed: list[Removed] = []
    if not job.fresh_since:
        return removed
    for manifest in list_committed(run):
        if manifest.attempt < job.fresh_since and manifest.time < before:
            folder = run.path(FOLDER, manifest.id)
            removed.append(Removed(folder, EARLIER, store.tree_size(folder), manifest.time))
            if not dry_run:
                remove(run, manifest)
    return removed


def _inspect(directory: str) -> tuple[int, Age] | None:
    """Returns the newest claim and the age of a directory; None if it is not a run directory."""
    if not store.is_url(directory) and (os.path.islink(directory) or not os.path.isdir(directory)):
        return None
    if _is_hidden(directory):
        return -1, Age(HALF_REMOVED, True, store.modified(directory))
    run = RunDirectory(directory)
    newest = run.newest_claim()
    age = _age(run, newest)
    return None if age is None else (newest, age)


def _has_gone(directory: str) -> bool:
    """Returns True if another collector has removed a run; removes empty directories that a claim has made since."""
    with contextlib.suppress(Exception):
        run = RunDirectory(directory)
        if not store.exists(run.path("job.json")):
            for folder, _, _ in () if run.is_remote or run.is_own() else os.walk(directory, topdown=False):
                os.rmdir(folder)
            return True
    return False


def _is_hidden(directory: str) -> bool:
    return os.path.basename(directory).startswith(HIDDEN)


def _age(run: RunDirectory, newest: int) -> Age | None:
    """Returns the age of a directory; None if it is not a run directory.

    Args:
        run: The directory.
        newest: Its newest claim, not counting the claim of this collector.

    Raises:
        Exception: the directory cannot be read.
    """
    claimed = run.claimed_at(newest) if newest >= 0 else None
    half_removed = claimed is not None and run.removal_claimed(newest)
    if not store.exists(run.path("job.json")):
        if claimed is None:
            return _age_of_unsubmitted(run)
        return Age(HALF_REMOVED, True, claimed) if half_removed else Age(ABANDONED, True, claimed, claimed)
    try:
        is_written = run.job().submission >= newest
        status = run.status()
        if not status.final:
            # The handle also determines whether the driver lives.
            status = RunHandle(run.directory).status()
    except RunNotFoundError as error:
        own_claim = f"submissions/{newest + 1}/"
        files = [run.path(name) for name in store.list_files(run.directory) if not name.startswith(own_claim)]
        if not files or not run.is_own():
            raise
        # A driver of another version of rankzero would write its files, too.
        return Age(UNREADABLE, True, max(map(store.modified, files)), problem=f"{type(error).__name__}: {error}")
    since = max(status.heartbeat, status.ended or 0.0)
    return Age(status.state, status.final, since, None if is_written or half_removed else claimed)


def _age_of_unsubmitted(run: RunDirectory) -> Age | None:
    """Returns the age of a directory of rankzero's without a submission; None if it is not rankzero's.

    A submitter that died before its submission, perhaps while Spark computed its dataset, has left it.
    """
    if not run.is_own() or run.strangers():
        return None
    folders = [run.path(DATASETS, name) for name in store.list_names(run.path(DATASETS))]
    files = [store.join(folder, name) for folder in folders for name in store.list_names(folder)]
    token = [run.path("token")] if store.exists(run.path("token")) else []
    since = max(map(store.modified, [*files, *token]), default=None)
    return None if since is None else Age(ABANDONED, True, since, since)


def _remove(run: RunDirectory, newest: int, age: Age) -> bool:
    """Removes a directory; False if another process was faster. Raises OSError (or an error of its fsspec driver)."""
    if _is_hidden(run.directory):
        _remove_hidden(run.directory)
        return True
    own = newest + 1
    store.prove(os.path.dirname(run.directory))
    if not run.claim_removal(own):
        return False
    if run.newest_claim() != own or _age(run, newest) != age:
        # A submitter that waits for the end of this claim continues.
        run.release(own)
        _has_gone(run.directory)
        return False
    if run.is_remote:
        _remove_objects(run, own)
        return True
    parent, name = os.path.split(run.directory)
    hidden = os.path.join(parent, f"{HIDDEN}{name[:100]}-{secrets.token_hex(4)}")
    try:
        os.rename(run.directory, hidden)
    except FileNotFoundError:
        return False
    except OSError:
        run.release(own)
        raise
    if RunDirectory(hidden).newest_claim() != own:
        # While this process was stopped, a submitter counted its claim as abandoned: the run lives.
        os.rename(hidden, run.directory)
        return False
    _remove_hidden(hidden)
    return True


def _remove_hidden(directory: str) -> None:
    # Another collector, which has not seen the new name, may add a claim to it.
    for _ in range(2):
        store.remove(directory)
    if os.path.exists(directory):
        raise OSError(f"{directory} cannot be removed entirely: check the owner of its files")


def _remove_objects(run: RunDirectory, own: int) -> None:
    """Removes a run from an object store while the claim of this collector is the newest."""
    store.remove(run.path("job.json"))
    names = [run.path(name) for name in store.list_names(run.directory) if name != "submissions"]
    numbers = [run.submission_path(number) for number in range(own)]
    for location in [*names, *numbers, run.directory]:
        if run.newest_claim() != own:
            raise OSError(f"{run.directory} was claimed by another process while it was being removed")
        store.remove(location)
    store.abort_uploads(run.path(FOLDER, ""))
