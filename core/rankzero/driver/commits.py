"""`Committer`: commits and prunes the checkpoints that ranks deliver, in a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from rankzero import store
from rankzero.data.table import Written
from rankzero.run.checkpoints import (
    FOLDER,
    MANIFEST,
    PIECES,
    CheckpointConfig,
    Manifest,
    damage_of,
    list_committed,
    read_manifests,
    remove,
    to_remove,
    up_to_whole,
)
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT = 600.0
"""Seconds that a run waits at its end for checkpoints that are still being stored."""

RETRY_TIMEOUT = 30.0
"""Seconds for which the commit of the newest checkpoint is retried while the store refuses it."""

_RETRY_INTERVAL = 0.5


class NotOwnerError(OSError):
    """The run directory belongs to another submission, so this driver may neither write nor delete there."""


class Committer:
    """Commits what ranks deliver, in a thread of its own, so a slow store delays neither training nor failures."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        world_size: int,
        config: CheckpointConfig,
        fresh_since: int,
        on_commit: Callable[[Manifest], None],
        on_loss: Callable[[int], None],
        owns: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepares the committer of one attempt.

        Args:
            run: The run.
            attempt: Number of the attempt.
            world_size: Number of ranks, which is the number of parts of a sharded checkpoint.
            config: How many checkpoints are kept, and which.
            fresh_since: First attempt of this training: checkpoints of earlier attempts do not count.
            on_commit: Called in the committer's thread after each commit.
            on_loss: Called in the same thread with the number of a checkpoint that could not be committed.
            owns: Returns True while the run directory still belongs to this driver's submission.
        """
        self._run = run
        self._attempt = attempt
        self._world_size = world_size
        self._config = config
        self._fresh_since = fresh_since
        self._on_commit = on_commit
        self._on_loss = on_loss
        self._owns = owns
        self._incoming: dict[int, dict[int, dict[str, Any]]] = {}
        self._newest: dict[int, dict[str, Any]] | None = None
        self._closed = False
        self._given = self._done = 0
        self._in_use: str | None = None
        self._kept: list[Manifest] | None = None
        """The committed checkpoints of this training, which only this object writes; None until they were read."""
        self.tables: Written = {}
        """The rows that belong to the newest committed checkpoint."""
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rankzero-checkpoints", daemon=True)

    def newest(self) -> Manifest | None:
        """Returns the checkpoint that this attempt starts from, and removes folders that can no longer be committed.

        It is the newest one that has all its files.

        Raises:
            OSError: the store cannot be read.
        """
        committed = [manifest for manifest in self._sweep("") if manifest.attempt >= self._fresh_since]
        # Damaged checkpoints are not pruned: `rankzero gc` removes them with their run.
        self._kept = kept = up_to_whole(self._run, committed)
        if not kept:
            return None
        self._in_use = kept[-1].id
        self.tables = kept[-1].tables
        # The previous attempt may have died before it pruned.
        self.do(self._prune)
        return kept[-1]

    def _sweep(self, begin: str) -> list[Manifest]:
        """Deletes uncommitted folders whose names start with ``begin``; returns the committed ones, oldest first."""
        self._check_owner()
        names = [name for name in store.list_names(self._run.path(FOLDER)) if name.startswith(begin)]
        committed = read_manifests(self._run, names)
        for name in set(names) - {manifest.id for manifest in committed}:
            if not store.exists(self._run.path(FOLDER, name, MANIFEST)):
                store.remove(self._run.path(FOLDER, name))
        store.abort_uploads(self._run.path(FOLDER, begin))
        return committed

    def sweep(self) -> None:
        """Schedules the deletion of files that ranks of this attempt had begun to write when they died."""
        # Only this attempt's: a newer driver may already write files of a later one.
        self.do(lambda: self._sweep(f"{self._attempt:04d}-"))

    def add(self, rank: int, part: dict[str, Any]) -> None:
        """Adds the part of one rank: the worker's message, with ``uploaded`` if the driver has the file.

        The checkpoint is committed when rank 0's part is there or, if it is sharded, the parts of all ranks.
        """
        parts = self._incoming.setdefault(part["index"], {})
        parts[rank] = part
        if not part["sharded"]:
            # Parts of other ranks do not belong to an unsharded checkpoint, in whatever order they arrive.
            parts = {rank: part}
        if len(parts) == (self._world_size if part["sharded"] else 1):
            for index in sorted(index for index in self._incoming if index < part["index"]):
                self.drop(index)
            del self._incoming[part["index"]]
            self._newest = parts
            self.do(lambda: self._commit_parts(parts))

    def drop(self, index: int) -> None:
        """Gives up a checkpoint of which a part will not arrive."""
        self._incoming.pop(index, None)
        self._on_loss(index)

    def do(self, action: Callable[[], object]) -> None:
        """Queues an action for the committer's thread, behind earlier ones."""
        if not self._thread.ident:
            self._thread.start()
        self._given += 1
        self._queue.put(action)

    def release(self) -> None:
        """Allows the checkpoint that this attempt started from to be pruned."""
        if self._in_use and self._thread.ident:
            self._in_use = None
            self.do(self._prune)

    def close(self, timeout: float) -> None:
        """Ends the thread; checkpoints that are not committed within ``timeout`` seconds are lost."""
        if self._thread.ident:
            self._queue.put(None)
            self._thread.join(timeout)
        self._closed = True

    def do_as_owner(self, action: Callable[[], object]) -> None:
        """Queues an action that runs only if the run directory still belongs to this driver's submission by then."""

        def guarded() -> None:
            self._check_owner()
            action()

        self.do(guarded)

    @property
    def is_busy(self) -> bool:
        """True while a queued action is not done."""
        return self._done < self._given

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            try:
                action()
            except NotOwnerError as error:
                logger.warning("nothing is written or deleted any more: %s", error)
            except Exception:
                logger.exception("the committer failed")
            self._done += 1

    def _commit_parts(self, parts: dict[int, dict[str, Any]]) -> None:
        def is_outdated(error: Exception) -> bool:
            # A newer checkpoint replaces this one; other queued actions do not.
            return self._closed or self._newest is not parts or isinstance(error, NotOwnerError)

        try:
            manifest = store.patiently(lambda: self._commit(parts), RETRY_TIMEOUT, _RETRY_INTERVAL, is_outdated)
        except Exception:
            # The previous checkpoint is complete, and a lost one must not end the training.
            logger.exception("a checkpoint could not be committed")
            self._on_loss(parts[min(parts)]["index"])
            return
        self.tables = manifest.tables
        if self._kept is not None:
            self._kept.append(manifest)
        self._on_commit(manifest)
        self._prune()

    def _commit(self, parts: dict[int, dict[str, Any]]) -> Manifest:
        lead = parts[min(parts)]
        folder = self._run.path(FOLDER, lead["id"])
        for part in parts.values():
            uploaded = part.get("uploaded")
            # The file is gone if an earlier try of this commit has moved it.
            if uploaded and os.path.exists(uploaded):
                store.make_directory(folder)
                store.upload(uploaded, store.join(folder, part["file"]), durable=True)
                store.remove(uploaded)
        if damage := damage_of(folder, parts.values()):
            raise OSError(damage)
        manifest = Manifest.of_parts(self._attempt, self._world_size, parts, self.tables)
        if self._closed:
            raise OSError("the attempt ended before the store had taken it")
        self._check_owner()
        if any("pieces" in part for part in parts.values()):
            lines = [part.get("pieces", "") for _, part in sorted(parts.items())]
            store.write_bytes(store.join(folder, PIECES), "\n".join(lines).encode(), durable=True)
        store.write_bytes(store.join(folder, MANIFEST), json.dumps(manifest.to_json()).encode(), durable=True)
        store.sync_directory(self._run.path(FOLDER))
        return manifest

    def _check_owner(self) -> None:
        if not self._owns():
            raise NotOwnerError("the run directory belongs to another submission by now")

    def _prune(self) -> None:
        try:
            self._check_owner()
            # Checkpoints of an earlier training stay until the user runs `rankzero gc`.
            if self._kept is None:
                self._kept = list_committed(self._run, self._fresh_since)
            for manifest in to_remove(self._kept, self._config, self._in_use):
                remove(self._run, manifest)
                self._kept.remove(manifest)
        except Exception:
            logger.warning("an old checkpoint could not be removed", exc_info=True)
