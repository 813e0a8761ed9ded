"""Retention: removes the directories of runs that ended long ago.

Whoever removes a run first claims its next submission, like a submitter, so of a removal and a submission of the
same run id one goes first. The newest claim always wins: a removal that sees another one stops.

What dies where: a directory on a local disk is first renamed to a hidden name, in one step, so there is the whole
run or none; the next `collect` removes what lies under hidden names. On an object store, which cannot rename,
``job.json`` goes first: from then on there is no run. The next `collect` finds the claim of the dead one, and goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rankzero import store
from rankzero.job import check_seconds
from rankzero.run.checkpoints import FOLDER, list_committed, remove
from rankzero.run.directory import DATASETS, RunDirectory
from rankzero.run.handle import RunHandle

logger = logging.getLogger(__name__)

HIDDEN = ".rankzero-removed-"
"""Begins the names of directories on their way out. A run id never begins with a dot."""

ABANDONED, HALF_REMOVED = "abandoned", "half-removed"
"""States that no run has: claimed but never written, and what a collector that died has left."""


CLAIM_PATIENCE = 3600.0
"""Seconds for which a submission may be on its way: the upload of a large payload shows no other sign of life."""


@dataclass(frozen=True)
class Age:
    """What decides about a directory.

    Attributes:
        state: The run's state, ``"failed"`` if its driver died; or `ABANDONED` or `HALF_REMOVED`.
        final: Nothing lives there that could still write.
        since: Unix time of the last sign of life: the end, or the last heartbeat if that came later.
        claimed: Unix time at which a submission was claimed that is not written; None if there is none.
    """

    state: str
    final: bool
    since: float
    claimed: float | None = None


def is_due(age: Age, now: float, older_than: float) -> bool:
    """True if the directory is to be removed.

    Args:
        age: What is known of it.
        now: Unix time.
        older_than: Seconds for which a run is kept after its last sign of life.
    """
    if age.state == HALF_REMOVED:
        return True
    if age.claimed is not None and now - age.claimed <= max(older_than, CLAIM_PATIENCE):
        return False
    return age.final and now - age.since > older_than


@dataclass(frozen=True)
class Removed:
    """A run directory that was removed, or in a dry run would be.

    Attributes:
        directory: Where it lay.
        state: The run's state; ``"abandoned"`` if it was claimed but never written, ``"half-removed"`` if a
            removal before this one died.
        size: Bytes of its files.
        since: Unix time of its last sign of life.
    """

    directory: str
    state: str
    size: int
    since: float


EARLIER = "earlier"
"""State of checkpoints whose run has begun from scratch since."""


@dataclass(frozen=True)
class Collection:
    """What `collect` did.

    Attributes:
        removed: The directories, in order of their names.
        kept: Number of run directories that live or are too young.
        problems: Directory to what is wrong with it. Such a directory stays.
        dry_run: True if nothing was removed in truth.
        checkpoints: Checkpoints that were removed from run directories that stay: their run was submitted again since,
            and began from scratch.
    """

    removed: list[Removed] = field(default_factory=list)
    kept: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    checkpoints: list[Removed] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all that was removed, or would be."""
        return sum(removed.size for removed in [*self.removed, *self.checkpoints])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the total ``size``, for a log or an XCom."""
        return {**asdict(self), "size": self.size}


def collect(
    location: str | os.PathLike[str], older_than: float, dry_run: bool = False, *, now: float | None = None
) -> Collection:
    """Removes the directories of runs that ended longer ago than ``older_than``.

    Removed are runs that have ended, runs whose driver died, and directories that were claimed for a run but never
    written. A run that lives stays, however old it is, and so does everything else that lies in the store.
    Of a run that stays, the checkpoints go that a training before it reported under the same run id, if they are that
    old: a training that begins from scratch leaves them. With a run's directory go its logs, its checkpoints and its
    result: a `rankzero.ResultRef` of it cannot be loaded any more. What is to stay longer belongs elsewhere:
    ``ResultRef.save(ref.load(), directory)``.

    Collectors may run at the same time, die at any moment, and meet submissions of the same run ids. On a local
    disk a run vanishes in one step. On an object store a submission in that moment waits up to 20 s for the
    removal; one that takes longer stops as soon as it sees the submission, and the run may then find
    checkpoints of the old one.

    Args:
        location: Root of the run directories, a path or an fsspec URL. One that is not there yet is empty.
        older_than: Seconds for which a run is kept after its end; for one whose driver died, after its
            last heartbeat.
        dry_run: Remove nothing; say what would be.
        now: Unix time by which ages are measured; None is the clock's.

    Returns:
        What was removed, and what could not be read or removed: one directory's trouble does not stop the others.

    Raises:
        InvalidJobError: ``older_than`` is no positive number of seconds.
        OSError: the store cannot be listed (or an error of its fsspec driver).

    Example:
        >>> from rankzero.run.retention import collect
        >>> collect("runs", older_than=30 * 86400, dry_run=True).size
        0
    """
    check_seconds("older_than", older_than, optional=False)
    now = time.time() if now is None else now
    root = store.normalize(location)
    removed: list[Removed] = []
    checkpoints: list[Removed] = []
    problems: dict[str, str] = {}
    kept = 0
    for name in store.list_names(root):
        directory = store.join(root, name)
        try:
            found = _look(directory)
            if found is None:
                continue
            newest, age = found
            if is_due(age, now, older_than):
                size = store.tree_size(directory)
                if dry_run or _remove(RunDirectory(directory), newest, age):
                    removed.append(Removed(directory, age.state, size, age.since))
                    continue
            kept += 1
            if age.state not in (ABANDONED, HALF_REMOVED):
                checkpoints += _remove_earlier(RunDirectory(directory), now - older_than, dry_run)
        except Exception as error:
            # Drivers of object stores have exceptions of their own.
            logger.warning("%s stays", directory, exc_info=True)
            problems[directory] = f"{type(error).__name__}: {error}"
    return Collection(removed, kept, problems, dry_run, checkpoints)


def _remove_earlier(run: RunDirectory, before: float, dry_run: bool) -> list[Removed]:
    """Removes the checkpoints of trainings that had the run id earlier, if they are older than a Unix time."""
    fresh_since = run.job().fresh_since
    removed = []
    for manifest in list_committed(run) if fresh_since else []:
        if manifest.attempt < fresh_since and manifest.time < before:
            folder = run.path(FOLDER, manifest.id)
            removed.append(Removed(folder, EARLIER, store.tree_size(folder), manifest.time))
            if not dry_run:
                remove(run, manifest)
    return removed


def _look(directory: str) -> tuple[int, Age] | None:
    """The newest claim in a directory and what decides about it; None if it is no run directory."""
    if not store.is_url(directory) and (os.path.islink(directory) or not os.path.isdir(directory)):
        return None
    if _is_hidden(directory):
        return -1, Age(HALF_REMOVED, True, store.modified(directory))
    run = RunDirectory(directory)
    newest = run.newest_claim()
    age = _age(run, newest)
    return None if age is None else (newest, age)


def _is_hidden(directory: str) -> bool:
    return os.path.basename(directory).startswith(HIDDEN)


def _age(run: RunDirectory, newest: int) -> Age | None:
    """What decides about a directory; None if it is no run directory.

    Args:
        run: The directory.
        newest: Its newest claim, or the newest before our own.

    Raises:
        Exception: it cannot be read.
    """
    claimed = run.claimed_at(newest) if newest >= 0 else None
    half_removed = claimed is not None and run.removal_claimed(newest)
    if not store.exists(run.path("job.json")):
        if claimed is None:
            # A submitter that died while Spark computed its dataset has claimed nothing yet.
            began = _rows_since(run)
            return None if began is None else Age(ABANDONED, True, began, began)
        return Age(HALF_REMOVED, True, claimed) if half_removed else Age(ABANDONED, True, claimed, claimed)
    is_written = run.job().submission >= newest
    status = run.status()
    if not status.final:
        # Only this knows whether the driver lives.
        status = RunHandle(run.directory).status()
    since = max(status.heartbeat, status.ended or 0.0)
    return Age(status.state, status.final, since, None if is_written or half_removed else claimed)


def _rows_since(run: RunDirectory) -> float | None:
    """Unix time of the last rows that Spark has written for a run; None if there are none."""
    folders = [run.path(DATASETS, name) for name in store.list_names(run.path(DATASETS))]
    files = [store.join(folder, name) for folder in folders for name in store.list_names(folder)]
    return max(map(store.modified, files), default=None)


def _remove(run: RunDirectory, newest: int, age: Age) -> bool:
    """True if the directory is deleted; False if somebody else was faster. Raises OSError, or its fsspec driver's."""
    if _is_hidden(run.directory):
        _remove_hidden(run.directory)
        return True
    own = newest + 1
    store.prove(os.path.dirname(run.directory))
    if not run.claim_removal(own):
        return False
    if run.newest_claim() != own or _age(run, newest) != age:
        # Whoever waits for the end of this claim goes on.
        run.release(own)
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
    _remove_hidden(hidden)
    return True


def _remove_hidden(directory: str) -> None:
    store.remove(directory)
    if os.path.exists(directory):
        raise OSError(f"{directory} cannot be removed entirely: look whom its files belong to")


def _remove_objects(run: RunDirectory, own: int) -> None:
    """Removes a run from an object store, as long as our claim is the newest."""
    store.remove(run.path("job.json"))
    names = [run.path(name) for name in store.list_names(run.directory) if name != "submissions"]
    numbers = [run.submission_path(number) for number in range(own)]
    for location in [*names, *numbers, run.directory]:
        if run.newest_claim() != own:
            raise OSError(f"{run.directory} was claimed by somebody else while it was removed")
        store.remove(location)
    store.abort_uploads(run.path(FOLDER, ""))
