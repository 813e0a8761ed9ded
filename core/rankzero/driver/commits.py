"""`Committer`: checkpoints that ranks deliver, committed and pruned in a thread of its own."""

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
    list_committed,
    read_manifests,
    remove,
    to_remove,
)
from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT = 600.0
"""Seconds that a run waits at its end for checkpoints which are on their way to the store."""

STORE_PATIENCE = 30.0
"""Seconds for which a store that refuses the newest checkpoint is asked again."""

_STORE_INTERVAL = 0.5


class NotOwnerError(OSError):
    """The run directory belongs to another submission: this driver may neither write nor delete there."""


class Committer:
    """Commits what ranks deliver, in a thread of its own: a slow store delays neither training nor failures."""

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
            world_size: Number of ranks: so many parts has a sharded checkpoint.
            config: What is kept.
            fresh_since: Attempts before this one do not count.
            on_commit: Called in the committer's thread after each commit.
            on_loss: Called there with the number of a checkpoint that could not be committed.
            owns: Whether the run directory is still that of this driver's submission.
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
        """The committed checkpoints of this training, of which this is the only writer; None before they were read."""
        self.tables: Written = {}
        """The rows that belong to the checkpoint that was committed last."""
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rankzero-checkpoints", daemon=True)

    def newest(self) -> Manifest | None:
        """The checkpoint that this attempt starts from. Removes what no attempt can commit any more.

        Raises:
            OSError: the store cannot be read.
        """
        committed = self._sweep("")
        self._kept = [manifest for manifest in committed if manifest.attempt >= self._fresh_since]
        if not self._kept:
            return None
        self._in_use = committed[-1].id
        self.tables = committed[-1].tables
        # The attempt before may have died before it could.
        self.do(self._prune)
        return committed[-1]

    def _sweep(self, begin: str) -> list[Manifest]:
        """Deletes folders, by the begin of their names, that are not committed; those that are, oldest first."""
        self._check_owner()
        names = [name for name in store.list_names(self._run.path(FOLDER)) if name.startswith(begin)]
        committed = read_manifests(self._run, names)
        for name in set(names) - {manifest.id for manifest in committed}:
            if not store.exists(self._run.path(FOLDER, name, MANIFEST)):
                store.remove(self._run.path(FOLDER, name))
        store.abort_uploads(self._run.path(FOLDER, begin))
        return committed

    def sweep(self) -> None:
        """Has the thread delete what ranks of this attempt had begun to write when they died."""
        # No other attempt's: a newer driver may be at work already.
        self.do(lambda: self._sweep(f"{self._attempt:04d}-"))

    def add(self, rank: int, part: dict[str, Any]) -> None:
        """Takes one rank's part: the worker's message, with ``uploaded`` if the driver holds the file.

        The checkpoint is committed when rank 0's part is there and, if it is sharded, everybody's.
        """
        parts = self._incoming.setdefault(part["index"], {})
        parts[rank] = part
        if not part["sharded"]:
            # A part of another rank does not belong to it, in whatever order they come.
            parts = {rank: part}
        if len(parts) == (self._world_size if part["sharded"] else 1):
            for index in sorted(index for index in self._incoming if index < part["index"]):
                self.drop(index)
            del self._incoming[part["index"]]
            self._newest = parts
            self.do(lambda: self._commit_parts(parts))

    def drop(self, index: int) -> None:
        """A part of this checkpoint will not come."""
        self._incoming.pop(index, None)
        self._on_loss(index)

    def do(self, action: Callable[[], object]) -> None:
        """Has the committer's thread do something after what it was given before."""
        if not self._thread.ident:
            self._thread.start()
        self._given += 1
        self._queue.put(action)

    def release(self) -> None:
        """The checkpoint that this attempt started from need not be kept any more."""
        if self._in_use and self._thread.ident:
            self._in_use = None
            self.do(self._prune)

    def close(self, timeout: float) -> None:
        """Ends the thread; what is not committed after ``timeout`` seconds never will be."""
        if self._thread.ident:
            self._queue.put(None)
            self._thread.join(timeout)
        self._closed = True

    def do_as_owner(self, action: Callable[[], object]) -> None:
        """Has the committer's thread do something, if the run directory is still this driver's by then."""

        def guarded() -> None:
            self._check_owner()
            action()

        self.do(guarded)

    @property
    def is_busy(self) -> bool:
        """True while something that was given is not done."""
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
            # A newer checkpoint is worth more than this one; other things that wait are not.
            return self._closed or self._newest is not parts or isinstance(error, NotOwnerError)

        try:
            manifest = store.patiently(lambda: self._commit(parts), STORE_PATIENCE, _STORE_INTERVAL, is_outdated)
        except Exception:
            # The checkpoint before it is whole, and training must not end for this one.
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
            # Gone if a try before this one came so far.
            if uploaded and os.path.exists(uploaded):
                store.make_directory(folder)
                store.upload(uploaded, store.join(folder, part["file"]))
                store.remove(uploaded)
        sizes = store.sizes(folder)
        for part in parts.values():
            if (size := sizes.get(part["file"])) != part["size"]:
                raise OSError(f"{folder}/{part['file']} has {size} bytes, not {part['size']}")
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
            # Those of an earlier training stay: a user reported them, and `rankzero gc` removes them.
            if self._kept is None:
                self._kept = list_committed(self._run, self._fresh_since)
            for manifest in to_remove(self._kept, self._config, self._in_use):
                remove(self._run, manifest)
                self._kept.remove(manifest)
        except Exception:
            logger.warning("an old checkpoint could not be removed", exc_info=True)
