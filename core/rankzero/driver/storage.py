"""`Storage`: stores what the ranks of an attempt deliver, checkpoints and rank 0's value, and removes the rest."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.messages import NEVER, Finished, Part
from rankzero.channel.server import UPLOAD
from rankzero.driver.ending import Facts
from rankzero.errors import ResultError
from rankzero.job import CheckpointConfig
from rankzero.run import checkpoints
from rankzero.run.checkpoints import FOLDER, MANIFEST, Manifest
from rankzero.run.directory import Submission
from rankzero.threads import ActionThread
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

CHECKPOINT_RETRY_TIMEOUT = bounds.scaled(30.0)  # For the newest checkpoint while the store refuses its commit
SLOWEST_STORE = 1 << 20  # Bytes per second; a store that takes a value more slowly counts as one that hangs

_VALUE = re.compile(r"value-[0-9]+\.[a-z]+")  # Name of the value of an attempt

T = TypeVar("T")


class NotOwnerError(OSError):
    """Another process has ended this submission, so its driver may neither publish nor delete anything."""


class Storage:
    """Stores what ranks deliver, in a thread of its own, so a slow store delays neither training nor failures.

    A rank that does not see the run directory sends its file over the channel, to a local directory, before the message
    about it.
    """

    def __init__(
        self,
        own: Submission,
        attempt: int,
        config: CheckpointConfig,
        facts: Facts,
        directory: str,
        wake: Callable[[object], None] = lambda _: None,
    ) -> None:
        """Creates a storage that has received nothing yet; its thread calls ``wake`` after each action."""
        self._own = own
        self._attempt = attempt
        self._config = config
        self._wake = wake
        self.facts = facts
        self.directory = directory
        self._thread = ActionThread("rankzero-checkpoints")
        self._last: Future[Any] | None = None
        self._closed = False
        self._incoming: dict[int, dict[int, dict[str, Any]]] = {}
        self._newest = -1
        self._settling: deque[Future[Manifest | int]] = deque()
        self._kinds: set[bool] = set()
        self._resumed: Manifest | None = None
        self._kept: list[Manifest] = []
        """The committed checkpoints of this training from which an attempt may start; only this object writes them."""
        self._has_ranks = True
        self._value: tuple[Future[ResultRef], list[Any], float] | None = None

    # -- the thread ----------------------------------------------------------------------------

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Queues an action behind earlier ones."""
        future = self._last = self._thread.submit(action)
        future.add_done_callback(self._wake)
        return future

    def _do(self, action: Callable[[], object]) -> None:
        """Queues an action whose error is only logged, unless another process has ended the submission by then."""

        def act() -> None:
            # After its end, its successor may use what this would remove.
            if self._closed:
                return
            try:
                self._check_owner()
                action()
            except NotOwnerError as error:
                logger.warning("nothing is written or deleted any more: %s", error)
            except Exception:
                logger.exception("the store failed")

        self.submit(act)

    @property
    def is_busy(self) -> bool:
        """True while a queued action is not done."""
        return self._last is not None and not self._last.done()

    def close(self, timeout: float) -> None:
        """Ends the thread; what is not stored within ``timeout`` seconds is lost."""
        self._thread.end(timeout)
        self._closed = True

    def _check_owner(self) -> None:
        """Raises NotOwnerError if another process has ended the submission, or removed the run."""
        if self._own.is_lost():
            raise NotOwnerError("another process has ended this submission")

    # -- the beginning and the end of an attempt -----------------------------------------------

    def begin(self) -> tuple[Manifest | None, str]:
        """Removes what earlier attempts left; returns the checkpoint to start from, and the text of the driver's claim.

        The checkpoint is the newest one that has all its files, and that no rows of its attempt precede, which would be
        missing. In the thread. Raises ResultError if rows precede all checkpoints.
        """

        def read() -> tuple[Manifest | None, str]:
            self._check_owner()
            self._kept = []
            found = self._sweep([*self._own.earlier(), self._own.directory])
            # A driver that was replaced may have published one more, which shares its id with one of this submission.
            first, own = self._own.job.first_attempt, self._own.directory
            found = [one for one in found if one.place == own or one.attempt < first]
            # Checkpoints that are not used are not pruned: `rankzero gc` removes them with their run.
            kept, table = checkpoints.up_to_whole(found), None
            while kept and (table := checkpoints.table_before(kept[-1])):
                logger.warning("checkpoint %s is not used: rows of the table %r precede it", kept[-1].id, table)
                kept = checkpoints.up_to_whole(kept[:-1])
            if table:
                raise ResultError(
                    f"no checkpoint can be resumed from: rows of the table {table!r} precede each that is kept, and "
                    "ended with their attempt. Write rows behind the training, or change code_version to start over"
                )
            self._kept, self._resumed = kept, kept[-1] if kept else None
            return self._resumed, store.read_bytes(self._own.path("driver")).decode()

        is_vain = lambda error: self._closed or isinstance(error, (NotOwnerError, ResultError))  # noqa: E731
        return store.patiently(read, STORE_OUTAGE(), bounds.STORE_RETRY_INTERVAL(), is_vain)

    def _sweep(self, places: list[str], value: str = "") -> list[Manifest]:
        """Removes what dead ranks had begun to write, and all values but ``value``. Returns checkpoints not known."""
        committed, known = [], {(one.place, one.id) for one in self._kept}
        for place in places:
            names = [name for name in checkpoints.list_folders(place) if (place, name) not in known]
            found = checkpoints.read_manifests(place, names)
            for name in set(names) - {manifest.id for manifest in found}:
                checkpoints.remove_uncommitted(place, name)
            committed += found
            store.abort_uploads(store.join(place, FOLDER, ""))
        store.abort_uploads(self._own.path("result", "value-"))
        for name in store.list_names(self._own.path("result")):
            path = self._own.path("result", name)
            if path != value and (_VALUE.fullmatch(name) or store.is_unfinished(name)):
                store.remove(path)
        return committed

    def end(self, value: str) -> None:
        """Schedules the removal of what does not count; the value does if the attempt has succeeded. No ranks live."""
        self._has_ranks = False
        self._do(self._prune)
        self._do(functools.partial(self._sweep, [self._own.directory], value))

    # -- checkpoints ---------------------------------------------------------------------------

    def add_part(self, rank: int, message: Part) -> None:
        """Adds the part of one rank; rank 0's commits the checkpoint or, if it is sharded, the last one of all ranks.

        Ends the attempt if rank 0's is whole, and another rank's is a part.
        """
        self._kinds.add(message.sharded)
        if len(self._kinds) > 1:
            self.facts.refusal = ResultError(
                "rank 0 has reported a whole checkpoint, and other ranks sharded ones, which would be lost: report "
                "checkpoints with sharded=True on every rank or on none"
            )
        index = message.index
        parts = self._incoming.setdefault(index, {})
        parts[rank] = dict(vars(message))
        if index <= self._newest:
            # A report of another thread, or of a signal handler, overtook this one.
            self._drop(index)
            return
        if not message.sharded:
            # Parts of other ranks do not belong to it.
            parts = {rank: parts[rank]}
        elif len(parts) < self.facts.num_processes:
            return
        # Ranks train in step, so the newest checkpoint is enough.
        del self._incoming[index]
        for older in [one for one in self._incoming if one < index]:
            self._drop(older)
        self._newest = index
        self._settling.append(self.submit(functools.partial(self._commit_parts, index, parts)))
        self._do(self._prune)

    def lose(self, index: int) -> None:
        """Notes that a part of a checkpoint will not arrive."""
        self._drop(index)
        self._settling.append(self.submit(lambda: index))

    def _drop(self, index: int) -> None:
        for part in self._incoming.pop(index, {}).values():
            # Not the folder, in which another rank may be writing.
            own = self._own.path(FOLDER, part["id"], part["file"])
            self._do(functools.partial(store.remove, self._uploaded(part["upload"]) if part["upload"] else own))

    def settled(self) -> Iterator[Manifest | int]:
        """Yields each checkpoint that was committed since the last call, and the number of each that is lost, in order.

        To ranks, a number means that no commit of a smaller one is under way. Notes the end of rank 0's value, too.
        """
        while self._settling and self._settling[0].done():
            yield self._settling.popleft().result()
        if self._value is None:
            return
        stored, value, deadline = self._value
        if stored.done():
            self._value = None
            try:
                self.facts.stored = stored.result(), value
                self.facts.finished.add(0)
            except ResultError as error:
                self.facts.refusal = error
        elif time.monotonic() > deadline and not self.facts.refusal:
            self.facts.refusal = _not_stored("the store does not answer")

    def mark_damaged(self, checkpoint: str) -> None:
        """Schedules the mark of a checkpoint in which a rank has found a wrong checksum."""
        found = self._resumed
        own = self._own.path(FOLDER, checkpoint)
        folder = found.folder if found and found.id == checkpoint else own
        self._do(functools.partial(checkpoints.mark_damaged, folder))

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
        self._kept.append(manifest)
        return manifest

    def _commit(self, parts: dict[int, dict[str, Any]]) -> Manifest:
        folder = self._own.path(FOLDER, parts[min(parts)]["id"])
        self._check_owner()
        for part in parts.values():
            uploaded = self._uploaded(part["upload"])
            # The file is gone if an earlier try of this commit has moved it.
            if part["upload"] and os.path.exists(uploaded):
                store.make_directory(folder)
                store.upload(uploaded, store.join(folder, part["file"]), durable=True)
                store.remove(uploaded)
        if damage := checkpoints.damage_of(folder, parts.values()):
            raise OSError(damage)
        manifest = Manifest.of_parts(self._own.directory, self._attempt, self.facts.num_processes, parts)
        if self._closed:
            raise OSError("the attempt ended before the store had taken it")
        self._check_owner()
        store.write_bytes(store.join(folder, MANIFEST), json.dumps(manifest.to_json()).encode(), durable=True)
        store.sync_directory(self._own.path(FOLDER))
        return manifest

    def _prune(self) -> None:
        # Ranks may still be reading the one before the newest, until they are notified of the newest.
        own = [manifest.id for manifest in self._kept if manifest.attempt == self._attempt]
        in_use = [self._resumed.id if self._resumed else None, *own[-2:-1]] if self._has_ranks else []
        for manifest in checkpoints.to_remove(self._kept, self._config, in_use):
            self._check_owner()
            checkpoints.remove(manifest)
            self._kept.remove(manifest)

    # -- rank 0's value ------------------------------------------------------------------------

    def _uploaded(self, name: str) -> str:
        """Returns the path of a file that an agent has sent."""
        return os.path.join(self.directory, f"{UPLOAD}{name}")

    def finish(self, rank: int, message: Finished, metrics: dict[str, Any]) -> None:
        """Records that a rank has finished. Rank 0 has finished when its value is stored, which `settled` notes.

        The summary of the value has rank 0's last metrics.
        """
        result = message.result
        if result is None:
            self.facts.finished.add(rank)
            return
        if self._kinds == {False}:
            # Other ranks may have reported more whole checkpoints.
            self.lose(NEVER)
        uri = self._own.path("result", f"value-{self._attempt}.{result['format']}")
        upload = result.get("upload")
        source = self._uploaded(upload) if upload else result["path"]
        summary = {**result["summary"], "metrics": dict(metrics)}

        def place() -> None:
            self._check_owner()
            if source != uri:
                # No process has synced a file that was sent.
                store.upload(source, uri, durable=upload is not None)
            elif (found := store.size(uri)) != result["size"]:
                raise OSError(f"{uri} has {found} bytes, not {result['size']}")

        def gives_up(error: Exception) -> bool:
            return isinstance(error, NotOwnerError) or not store.is_url(uri)

        def store_it() -> ResultRef:
            try:
                store.patiently(place, STORE_OUTAGE(), bounds.WRITE_RETRY_INTERVAL(), gives_up)
                return ResultRef(uri, result["format"], result["digest"], result["size"], summary).fingerprinted()
            except Exception as error:
                raise _not_stored(f"{type(error).__name__}: {error}") from error

        value = [result["value"]] if "value" in result else []
        deadline = time.monotonic() + STORE_OUTAGE() + result["size"] / SLOWEST_STORE
        # In the thread: a disk may hang, too.
        self._value = self.submit(store_it), value, deadline


def _not_stored(error: str) -> ResultError:
    return ResultError(f"rank 0 returned, but its value could not be stored: {error}")


def files_of(checkpoint: Manifest) -> dict[str, str]:
    """Returns the files of the checkpoint to start from, by the names under which agents request them."""
    files = {"manifest": MANIFEST} | {rank: part["file"] for rank, part in checkpoint.parts.items()}
    return {f"checkpoint-{name}": store.join(checkpoint.folder, file) for name, file in files.items()}
