"""`Storage`: stores rank 0's value and the parts of checkpoints that ranks report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.messages import Finished, Part, Uploaded
from rankzero.driver import ending
from rankzero.driver.commits import Committer
from rankzero.driver.ending import Facts
from rankzero.driver.rows import remove_rows
from rankzero.errors import ResultError
from rankzero.run.checkpoints import FOLDER
from rankzero.run.directory import RunDirectory
from rankzero.values.formats import SHARDS
from rankzero.values.ref import ResultRef, fingerprint_of

logger = logging.getLogger(__name__)

RESULT_STORED = "result-stored"

_RESULT_INTERVAL = 0.5


class Storage:
    """Matches the reports of ranks with the files that their agents sent, and stores both.

    A rank that does not see the run directory sends its file over the channel before the message about it.
    """

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        committer: Committer,
        facts: Facts,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        """Creates a storage that has received no files yet.

        Args:
            run: The run.
            number: Number of the attempt.
            committer: Commits parts of checkpoints; its thread makes all requests to an object store.
            facts: Receives finished ranks and errors of the store.
            send: Sends a message to the driver's thread, from any thread.
        """
        self._run = run
        self._number = number
        self._committer = committer
        self._facts = facts
        self._send = send
        self._uploads: dict[tuple[int, str], Uploaded] = {}
        self._kinds: dict[bool, int] = {}

    def note_upload(self, task: int, message: Uploaded) -> None:
        """Records that a file of this task has arrived over the channel, or that it will not."""
        self._uploads[task, message.name] = message

    def note_kind(self, rank: int, *, sharded: bool) -> None:
        """Records whether a rank's checkpoints are sharded. Ends the attempt if the ranks do not agree about that."""
        first = self._kinds.setdefault(sharded, rank)
        other = self._kinds.get(not sharded)
        if first == rank and other is not None:
            whole, part = (other, rank) if sharded else (rank, other)
            self._facts.refusal = ResultError(
                f"rank {whole} has reported a whole checkpoint, and rank {part} a sharded one, so parts would be lost: "
                "report checkpoints with sharded=True on every rank or on none"
            )

    def add_part(self, rank: int, task: int, message: Part) -> None:
        """Adds a rank's part of a checkpoint."""
        part = message.facts()
        if name := message.upload:
            uploaded = self._uploads.pop((task, name), None)
            if uploaded is None or not _is_whole(uploaded, message):
                what = uploaded.error or "it was damaged on its way" if uploaded else "it did not arrive"
                logger.error("checkpoint %s: the part of rank %s is lost: %s", message.id, rank, what)
                self._committer.drop(message.index)
                return
            part["uploaded"] = uploaded.path
        self._committer.add(rank, part)

    def commit(self, rank: int, task: int, message: Finished) -> None:
        """Records a rank's commit. Rank 0 has committed when its value is stored, which `on_stored` records."""
        result = message.result
        if result is None:
            self._facts.finished.add(rank)
            return
        path, is_uploaded = result["path"], False
        if uploaded := self._uploads.pop((task, "value"), None):
            if uploaded.digest != result["digest"]:
                self._facts.refusal = ending.not_stored(uploaded.error or "the upload was damaged on its way")
                return
            path, is_uploaded = uploaded.path, True
        uri = self._run.path("result", f"value-{self._number}.{result['format']}")

        def put() -> None:
            error = _place(path, uri, result["size"], durable=is_uploaded)
            fingerprint = None if error else fingerprint_of(uri, result["format"])
            stored = {"type": RESULT_STORED, "result": result, "uri": uri, "error": error}
            self._send({**stored, "fingerprint": fingerprint})

        if self._run.is_remote or "value" not in result:
            # In the committer's thread: the driver continues to check for failures and cancels.
            self._committer.do(put)
        else:
            put()

    def sweep(self) -> None:
        """Schedules the deletion of everything that this attempt stored; it counts as failed from now on."""
        self._facts.is_given_up = True
        self._committer.sweep()
        attempts = range(self._number, self._number + 1)
        # In the committer's thread, after its pending commits.
        self._committer.do_as_owner(lambda: remove_rows(self._run, attempts, self._committer.tables))
        if self._run.is_remote:
            self._committer.do_as_owner(lambda: remove_values(self._run, attempts))

    def abort_uploads(self) -> None:
        """Schedules the abort of uploads that ranks of this attempt began and repeated after an outage of the store."""
        begins = self._run.path(FOLDER, f"{self._number:04d}-"), self._run.path("result", f"value-{self._number}.")
        for begin in begins if self._run.is_remote else ():
            self._committer.do_as_owner(functools.partial(store.abort_uploads, begin))

    def on_stored(self, message: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Records that rank 0's value is stored, or that the store refused it.

        Args:
            message: A message of the type `RESULT_STORED`.
            metrics: Rank 0's last metrics, for the summary.
        """
        if message["error"]:
            self._facts.refusal = ending.not_stored(message["error"])
            return
        result = message["result"]
        summary = {**result["summary"], "metrics": dict(metrics)}
        ref = ResultRef(
            message["uri"], result["format"], result["digest"], result["size"], summary, message["fingerprint"]
        )
        self._facts.note_stored(ref, [result["value"]] if "value" in result else [])


def remove_values(run: RunDirectory, attempts: range) -> None:
    """Deletes values and unfinished uploads of failed attempts from an object store."""
    begins = tuple(f"value-{attempt}." for attempt in attempts)
    for begin in begins:
        store.abort_uploads(run.path("result", begin))
    for name in store.list_names(run.path("result")) if begins else []:
        if name.startswith(begins):
            store.remove(run.path("result", name))


def _is_whole(uploaded: Uploaded, part: Part) -> bool:
    # The index of a sharded checkpoint has checksums of its own, and the channel authenticates its frames.
    return (part.format == SHARDS or uploaded.digest == part.sha256) and uploaded.size == part.size


def _place(path: str, uri: str, size: int, *, durable: bool) -> str | None:
    """Moves the result into place, unless its rank has done so; returns a message if the store refused it.

    Args:
        path: The local file, or the URL of a file that the rank has written.
        uri: Location of the result.
        size: Its bytes.
        durable: True if no process has synced the file.
    """

    def place() -> None:
        if path != uri:
            store.upload(path, uri, durable=durable)
        elif (found := store.size(uri)) != size:
            raise OSError(f"{uri} has {found} bytes, not {size}")

    try:
        store.patiently(place, STORE_OUTAGE, _RESULT_INTERVAL, lambda _: not store.is_url(uri))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
