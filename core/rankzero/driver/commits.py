"""`Committer`: commits and prunes the checkpoints that ranks deliver, in a thread of its own."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from rankzero import bounds, store
from rankzero.channel.messages import NEVER
from rankzero.driver.policy import name_ranks
from rankzero.job import CheckpointConfig
from rankzero.run.checkpoints import (
    FOLDER,
    MANIFEST,
    Manifest,
    damage_of,
    list_committed,
    list_folders,
    read_manifests,
    remove,
    remove_uncommitted,
    to_remove,
    up_to_whole,
    without_rows,
)
from rankzero.run.directory import Submission
from rankzero.threads import ActionThread

logger = logging.getLogger(__name__)

CHECKPOINT_RETRY_TIMEOUT = bounds.scaled(30.0)  # For the newest checkpoint while the store refuses its commit
MANY_WAITING = 3  # Sharded checkpoints that wait for parts, from which on ranks that have given none are named

T = TypeVar("T")


class NotOwnerError(OSError):
    """Another process has ended this submission, so its driver may neither publish nor delete anything."""


class Committer:
    """Commits what ranks deliver, in a thread of its own, so a slow store delays neither training nor failures."""

    def __init__(
        self,
        own: Submission,
        attempt: int,
        world_size: int,
        config: CheckpointConfig,
        wake: Callable[[object], None] | None = None,
    ) -> None:
        """Prepares the committer of one attempt.

        Args:
            own: The submission.
            attempt: Number of the attempt.
            world_size: Number of ranks, which is the number of parts of a sharded checkpoint.
            config: How many checkpoints are kept, and which.
            wake: Called in the committer's thread after each action.
        """
        self._own = own
        self._attempt = attempt
        self._world_size = world_size
        self._config = config
        self._wake = wake
        self._incoming: dict[int, dict[int, dict[str, Any]]] = {}
        self._newest = -1
        self._settling: deque[Future[Manifest | int]] = deque()
        self._has_warned = self._has_lost = self._closed = False
        self._last: Future[Any] | None = None
        self._in_use: str | None = None
        self._is_released = False
        self._kept: list[Manifest] | None = None
        """The committed checkpoints of this training, which only this object writes; None until they were read."""
        self._thread = ActionThread("rankzero-checkpoints")

    def newest(self) -> Manifest | None:
        """Returns the checkpoint that this attempt starts from, and removes folders that can no longer be committed.

        It is the newest one that has all its files, and that no rows precede.

        Raises:
            OSError: the store cannot be read.
        """
        self.check_owner()
        committed = self._training(self._sweep)
        # Damaged checkpoints are not pruned: `rankzero gc` removes them with their run.
        self._kept = kept = up_to_whole(committed)
        if kept and (not (found := without_rows(kept)) or found[-1] is not kept[-1]):
            what = "rows that ended with their attempt precede it. Write rows behind the training"
            logger.warning("nothing resumes from checkpoint %s: %s", kept[-1].id, what)
        if not kept or not found:
            return None
        self._in_use = found[-1].id
        # The previous attempt may have died before it pruned.
        self.do(self._prune)
        return found[-1]

    def _training(self, read: Callable[[str], list[Manifest]]) -> list[Manifest]:
        """Returns the checkpoints of this training, oldest first, as ``read`` finds them in a submission's folder."""
        first, own = self._own.job.first_attempt, self._own.directory
        found = [one for place in [*self._own.earlier(), own] for one in read(place)]
        # A driver that was replaced may have published one more, which shares its id with one of this submission.
        return [one for one in found if one.place == own or one.attempt < first]

    def _sweep(self, place: str, begin: str = "") -> list[Manifest]:
        """Deletes uncommitted folders whose names start with ``begin``; returns the committed ones, oldest first."""
        names = [name for name in list_folders(place) if name.startswith(begin)]
        committed = read_manifests(place, names)
        for name in set(names) - {manifest.id for manifest in committed}:
            remove_uncommitted(place, name)
        store.abort_uploads(store.join(place, FOLDER, begin))
        return committed

    def sweep(self) -> None:
        """Schedules the deletion of files that ranks of this attempt had begun to write when they died."""
        self.do(functools.partial(self._sweep, self._own.directory, f"{self._attempt:04d}-"), as_owner=True)

    def add(self, rank: int, part: dict[str, Any]) -> Future[Manifest | int] | None:
        """Adds the part of one rank: the worker's message, with ``uploaded`` if the driver has the file.

        Returns:
            The commit, which begins when rank 0's part is there or, if the checkpoint is sharded, the parts of all
            ranks; else None.
        """
        index = part["index"]
        parts = self._incoming.setdefault(index, {})
        parts[rank] = part
        if index <= self._newest:
            # A report of another thread, or of a signal handler, overtook this one.
            self._remove_parts(index)
            return None
        if not part["sharded"]:
            # Parts of other ranks do not belong to it.
            parts = {rank: part}
        elif len(parts) < self._world_size:
            self._name_absent(part["id"])
            return None
        del self._incoming[index]
        # Ranks train in step, so the newest checkpoint is enough.
        for older in [older for older in self._incoming if older < index]:
            self._remove_parts(older)
        self._newest = index
        commit = self._settle(functools.partial(self._commit_parts, index, parts))
        self.do(self._prune)
        return commit

    def _name_absent(self, newest: str) -> None:
        """Warns once about ranks that give no parts, while others do."""
        absent = set(range(self._world_size)).difference(*self._incoming.values())
        if absent and len(self._incoming) >= MANY_WAITING and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "checkpoint %s and %d before it are not complete: %s gave no part of them. A sharded checkpoint "
                "consists of the parts of all ranks: call report(checkpoint=...) on every rank",
                newest,
                len(self._incoming) - 1,
                name_ranks(sorted(absent)),
            )

    def lose(self, index: int) -> None:
        """Notes that a part of a checkpoint will not arrive, and deletes the parts that have arrived."""
        self._remove_parts(index)
        self._settle(lambda: index)

    def _remove_parts(self, index: int) -> None:
        self._has_lost = True
        for part in self._incoming.pop(index, {}).values():
            # Not the folder, in which another rank may be writing.
            places = part.get("uploaded"), self._own.path(FOLDER, part["id"], part["file"])
            for place in filter(None, places):
                self.do(functools.partial(store.remove, place), as_owner=True)

    @property
    def has_rest(self) -> bool:
        """True if parts of checkpoints that are not committed may be in the store."""
        return self._has_lost or bool(self._incoming)

    def note_last(self) -> None:
        """Notes that every checkpoint was added that will be."""
        self._settle(lambda: NEVER)

    def _settle(self, action: Callable[[], Manifest | int]) -> Future[Manifest | int]:
        settling = self.submit(action)
        self._settling.append(settling)
        return settling

    def settled(self) -> Iterator[Manifest | int]:
        """Yields each checkpoint that was committed since the last call, and the number of each that is lost.

        After the last one, the number is `NEVER`. They come in order: to ranks, a number means that no commit of a
        smaller one is under way.
        """
        while self._settling and self._settling[0].done():
            yield self._settling.popleft().result()

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Queues an action for the committer's thread, behind earlier ones."""
        future = self._thread.submit(action)
        if self._wake:
            future.add_done_callback(self._wake)
        self._last = future
        return future

    def do(self, action: Callable[[], object], *, as_owner: bool = False) -> None:
        """Queues an action whose error is only logged.

        Args:
            action: The action.
            as_owner: True skips it if another process has ended the submission by then.
        """
        self.submit(functools.partial(self._do, action, as_owner))

    def _do(self, action: Callable[[], object], as_owner: bool) -> None:
        if self._closed:
            # Its successor may use by now what this would remove.
            return
        try:
            if as_owner:
                self.check_owner()
            action()
        except NotOwnerError as error:
            logger.warning("nothing is written or deleted any more: %s", error)
        except Exception:
            logger.exception("the committer failed")

    def release(self) -> None:
        """Allows the checkpoints that ranks may read, except the newest, to be pruned: there are no ranks any more."""
        self._is_released = True
        if self._kept:
            self.do(self._prune)

    def close(self, timeout: float) -> None:
        """Ends the thread; checkpoints that are not committed within ``timeout`` seconds are lost."""
        self._thread.end(timeout)
        self._closed = True

    @property
    def is_busy(self) -> bool:
        """True while a queued action is not done."""
        return self._last is not None and not self._last.done()

    def _commit_parts(self, index: int, parts: dict[int, dict[str, Any]]) -> Manifest | int:
        """Returns the manifest of a checkpoint, which is committed; its number if the store did not take it."""

        def is_outdated(error: Exception) -> bool:
            # A newer checkpoint replaces this one; other queued actions do not.
            return self._closed or self._newest != index or isinstance(error, NotOwnerError)

        commit, pause = functools.partial(self._commit, parts), bounds.WRITE_RETRY_INTERVAL()
        try:
            manifest = store.patiently(commit, CHECKPOINT_RETRY_TIMEOUT(), pause, is_outdated)
        except Exception as error:
            # The previous checkpoint is complete, and a lost one must not end the training.
            logger.warning("a checkpoint could not be committed: %s: %s", type(error).__name__, error)
            return index
        if self._kept is not None:
            self._kept.append(manifest)
        return manifest

    def _commit(self, parts: dict[int, dict[str, Any]]) -> Manifest:
        lead = parts[min(parts)]
        folder = self._own.path(FOLDER, lead["id"])
        self.check_owner()
        for part in parts.values():
            uploaded = part.get("uploaded")
            # The file is gone if an earlier try of this commit has moved it.
            if uploaded and os.path.exists(uploaded):
                store.make_directory(folder)
                store.upload(uploaded, store.join(folder, part["file"]), durable=True)
                store.remove(uploaded)
        if damage := damage_of(folder, parts.values()):
            raise OSError(damage)
        manifest = Manifest.of_parts(self._own.directory, self._attempt, self._world_size, parts)
        if self._closed:
            raise OSError("the attempt ended before the store had taken it")
        self.check_owner()
        store.write_bytes(store.join(folder, MANIFEST), json.dumps(manifest.to_json()).encode(), durable=True)
        store.sync_directory(self._own.path(FOLDER))
        return manifest

    def check_owner(self) -> None:
        """Raises NotOwnerError if another process has ended the submission, or removed the run."""
        if self._own.is_lost():
            raise NotOwnerError("another process has ended this submission")

    def _prune(self) -> None:
        try:
            if self._kept is None:
                self._kept = self._training(lambda place: list_committed([place]))
            # Ranks may still be reading the one before the newest, until they are notified of the newest.
            own = [manifest.id for manifest in self._kept if manifest.attempt == self._attempt]
            in_use = [] if self._is_released else [self._in_use, *own[-2:]]
            # The next attempt starts from it.
            in_use += [manifest.id for manifest in without_rows(self._kept)[-1:]]
            for manifest in to_remove(self._kept, self._config, in_use):
                self.check_owner()
                remove(manifest)
                self._kept.remove(manifest)
        except Exception as error:
            logger.warning("an old checkpoint could not be removed: %s: %s", type(error).__name__, error)
