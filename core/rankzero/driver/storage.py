"""`Storage` stores rank 0's value and the parts of checkpoints; `Scratch` has them on their way to an object store."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.messages import Finished, Part
from rankzero.channel.server import UPLOAD
from rankzero.driver.commits import Committer, NotOwnerError
from rankzero.driver.ending import Facts
from rankzero.driver.tables import remove_rows
from rankzero.errors import ResultError
from rankzero.run.checkpoints import FOLDER, MANIFEST, Manifest
from rankzero.run.directory import Submission
from rankzero.task.scratch import lock_directory, make_scratch, scratch_root
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

SLOWEST_STORE = 1 << 20  # Bytes per second; a store that takes a value more slowly counts as one that hangs

_SCRATCH_PREFIX = "rankzero-driver-"

_VALUE = re.compile(r"value-([0-9]+)\.[a-z]+")
"""Name of the value of an attempt."""


class Storage:
    """Matches the reports of ranks with the files that their agents sent, and stores both.

    A rank that does not see the run directory sends its file over the channel before the message about it.
    """

    def __init__(self, own: Submission, number: int, committer: Committer, facts: Facts, directory: str) -> None:
        """Creates a storage that has received no files yet.

        Args:
            own: The submission.
            number: Number of the attempt.
            committer: Commits parts of checkpoints; its thread makes all requests to an object store.
            facts: Receives finished ranks and errors of the store.
            directory: Local directory of the files that agents send.
        """
        self._own = own
        self._number = number
        self.committer = committer
        self.facts = facts
        self.directory = directory
        self.received: dict[str, int | str] = {}
        """The size of each file that arrived, or a text that says why it did not, by its path (`channel.server`)."""
        self._kinds: set[bool] = set()
        self._storing: Future[ResultRef] | None = None
        self._storing_ends = 0.0
        self._value: list[Any] = []

    def begin(self, first_attempt: int, is_called_off: Callable[[], bool]) -> tuple[Manifest | None, str]:
        """Returns the checkpoint to start from and the text by which agents know the folder; removes earlier leftovers.

        Args:
            first_attempt: The first attempt of this submission.
            is_called_off: Returns True if the run must end, and so need not wait for a store that is out.
        """

        def read() -> tuple[Manifest | None, str]:
            resume = self.committer.newest()
            remove_leftovers(self._own, range(first_attempt, self._number))
            return resume, self._own.token()

        def gives_up(error: Exception) -> bool:
            return isinstance(error, NotOwnerError) or is_called_off()

        return store.patiently(read, STORE_OUTAGE(), bounds.STORE_RETRY_INTERVAL(), gives_up)

    def _take(self, name: str) -> tuple[str, int | str | None]:
        """Returns the path of a file that an agent has sent, and its size, or why it is not there; None if unknown."""
        path = os.path.join(self.directory, f"{UPLOAD}{name}")
        return path, self.received.pop(path, None)

    def add_part(self, rank: int, message: Part) -> None:
        """Adds a rank's part of a checkpoint. Ends the attempt if rank 0's is whole, and another rank's is a part."""
        self._kinds.add(message.sharded)
        if len(self._kinds) > 1:
            self.facts.refusal = ResultError(
                "rank 0 has reported a whole checkpoint, and other ranks sharded ones, which would be lost: report "
                "checkpoints with sharded=True on every rank or on none"
            )
        part = message.facts()
        if name := message.upload:
            path, found = self._take(name)
            if found != message.size:
                what = found if isinstance(found, str) else "it did not arrive"
                logger.error("checkpoint %s: the part of rank %s is lost: %s", message.id, rank, what)
                self.committer.lose(message.index)
                return
            part["uploaded"] = path
        self.committer.add(rank, part)

    def finish(self, rank: int, message: Finished, metrics: dict[str, Any]) -> None:
        """Records that a rank has finished. Rank 0 has finished when its value is stored, which `poll` notes.

        Args:
            rank: The rank.
            message: Its message.
            metrics: Rank 0's last metrics, for the summary of its value.
        """
        result = message.result
        if result is None:
            self.facts.finished.add(rank)
            return
        if self._kinds == {False}:
            # Other ranks may wait for one more whole checkpoint, since they have reported more often.
            self.committer.note_last()
        path, is_uploaded = self._take("rank-0-value")
        if isinstance(is_uploaded, str):
            self.facts.refusal = _not_stored(is_uploaded)
            return
        if is_uploaded is None:
            path = result["path"]
        uri = self._own.path("result", f"value-{self._number}.{result['format']}")
        store_it = functools.partial(
            self._store_value, path, uri, result, dict(metrics), durable=is_uploaded is not None
        )
        self._value = [result["value"]] if "value" in result else []
        # In the committer's thread: a disk may hang, too.
        self._storing = self.committer.submit(store_it)
        self._storing_ends = time.monotonic() + STORE_OUTAGE() + result["size"] / SLOWEST_STORE

    def poll(self) -> None:
        """Notes that rank 0's value is stored, or that the store refused it or does not answer, once that is known."""
        if self._storing and self._storing.done():
            try:
                self.facts.note_stored(self._storing.result(), self._value)
            except ResultError as error:
                self.facts.refusal = error
            self._storing = None
        elif self._storing and time.monotonic() > self._storing_ends and not self.facts.refusal:
            self.facts.refusal = _not_stored("the store does not answer")

    def _store_value(
        self, path: str, uri: str, result: dict[str, Any], metrics: dict[str, Any], *, durable: bool
    ) -> ResultRef:
        """Moves rank 0's value into place, unless the rank has done so. Raises ResultError if the store refuses it.

        Args:
            path: The local file, or the URL of a file that the rank has written.
            uri: Location of the result.
            result: The facts about the value from the rank's message.
            metrics: Rank 0's last metrics.
            durable: True if no process has synced the file.
        """

        def place() -> None:
            self.committer.check_owner()
            if path != uri:
                store.upload(path, uri, durable=durable)
            elif (found := store.size(uri)) != result["size"]:
                raise OSError(f"{uri} has {found} bytes, not {result['size']}")

        def gives_up(error: Exception) -> bool:
            return isinstance(error, NotOwnerError) or not store.is_url(uri)

        summary = {**result["summary"], "metrics": metrics}
        try:
            store.patiently(place, STORE_OUTAGE(), bounds.WRITE_RETRY_INTERVAL(), gives_up)
            return ResultRef(uri, result["format"], result["digest"], result["size"], summary).fingerprinted()
        except Exception as error:
            raise _not_stored(f"{type(error).__name__}: {error}") from error

    def sweep(self) -> None:
        """Schedules the deletion of everything that this attempt stored; it counts as failed from now on."""
        self.facts.is_given_up = True
        self.committer.sweep()
        attempts = range(self._number, self._number + 1)
        remove = functools.partial(remove_rows, self._own.directory, attempts)
        self.committer.do(remove, as_owner=True)
        if self._own.is_remote:
            self.committer.do(functools.partial(remove_values, self._own, attempts), as_owner=True)

    def abort_uploads(self) -> None:
        """Schedules the abort of uploads that ranks of this attempt began and repeated after an outage of the store."""
        begins = self._own.path(FOLDER, f"{self._number:04d}-"), self._own.path("result", f"value-{self._number}.")
        for begin in begins if self._own.is_remote else ():
            self.committer.do(functools.partial(store.abort_uploads, begin), as_owner=True)


def _not_stored(error: str) -> ResultError:
    return ResultError(f"rank 0 returned, but its value could not be stored: {error}")


def files_of(checkpoint: Manifest | None) -> dict[str, str]:
    """Returns the files of the checkpoint to start from, by the names under which agents request them."""
    if checkpoint is None:
        return {}
    files = {rank: part["file"] for rank, part in checkpoint.parts.items()}
    files["manifest"] = MANIFEST
    return {f"checkpoint-{name}": store.join(checkpoint.folder, file) for name, file in files.items()}


def remove_leftovers(own: Submission, attempts: range) -> None:
    """Removes files that ranks of earlier attempts had begun to write when the ranks or their driver died."""
    for place in (*own.earlier(), own.directory):
        remove_rows(place, attempts if place == own.directory else None)
    if own.is_remote:
        remove_values(own, attempts)
        return
    for name in store.list_names(own.path("result")):
        if store.is_unfinished(name):
            store.remove(own.path("result", name))


def remove_values(own: Submission, attempts: range) -> None:
    """Deletes values and unfinished uploads of failed attempts from an object store."""
    for attempt in attempts:
        store.abort_uploads(own.path("result", f"value-{attempt}."))
    for name in store.list_names(own.path("result")) if attempts else []:
        if (value := _VALUE.fullmatch(name)) and int(value[1]) in attempts:
            store.remove(own.path("result", name))


class Scratch:
    """A temporary directory, locked while its process lives; creating one removes those of killed drivers.

    Attributes:
        path: The directory.
    """

    def __init__(self) -> None:
        """Creates and locks the directory.

        Raises:
            OSError: the disk is full.
            RuntimeError: no temporary directory is writable.
        """
        self.path = make_scratch(scratch_root(), _SCRATCH_PREFIX)
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Removes the directory and its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
