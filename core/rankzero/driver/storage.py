"""`Storage`: rank 0's value and parts of checkpoints, from what ranks report to where they are kept."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.frames import Message
from rankzero.driver import verdict
from rankzero.driver.commits import Committer
from rankzero.driver.outcome import Outcome
from rankzero.driver.rows import remove_rows
from rankzero.run.checkpoints import FOLDER
from rankzero.run.directory import RunDirectory
from rankzero.values.formats import SHARDS
from rankzero.values.ref import ResultRef, fingerprint_of

logger = logging.getLogger(__name__)

RESULT_STORED = "result-stored"

_RESULT_INTERVAL = 0.5


class Storage:
    """Joins what ranks report with the files that their agents sent, and has both stored.

    A file comes over the channel before the message that belongs to it, where a rank does not see the run directory.
    """

    def __init__(
        self, run: RunDirectory, number: int, committer: Committer, outcome: Outcome, send: Callable[[Message], None]
    ) -> None:
        """Nothing has come yet.

        Args:
            run: The run.
            number: Of the attempt.
            committer: Takes parts of checkpoints, and runs in its thread what talks to an object store.
            outcome: Learns of commits and of what cannot be stored.
            send: Sends a message to the driver's thread, from any thread.
        """
        self._run = run
        self._number = number
        self._committer = committer
        self._outcome = outcome
        self._send = send
        self._uploads: dict[tuple[int, str], Message] = {}

    def note_upload(self, task: int, message: Message) -> None:
        """A file of this task has come over the channel, or will not."""
        self._uploads[task, message["name"]] = message

    def add_part(self, rank: int, task: int, message: Message) -> None:
        """Takes a rank's part of a checkpoint."""
        part = {**message}
        if name := message.get("upload"):
            uploaded = self._uploads.pop((task, name), None)
            if uploaded is None or not _is_whole(uploaded, message):
                what = uploaded.get("error", "it was damaged on its way") if uploaded else "it did not arrive"
                logger.error("checkpoint %s: the part of rank %s is lost: %s", message["id"], rank, what)
                self._committer.drop(message["index"])
                return
            part["uploaded"] = uploaded["path"]
        self._committer.add(rank, part)

    def commit(self, rank: int, task: int, message: Message) -> None:
        """Takes a rank's commit. Rank 0 has committed when its value is stored: `on_stored`."""
        if "result" not in message:
            self._outcome.note_committed(rank)
            return
        result = message["result"]
        path = result["path"]
        if uploaded := self._uploads.pop((task, "value"), None):
            if uploaded.get("digest") != result["digest"]:
                self._outcome.refusal = verdict.not_stored(uploaded.get("error", "the upload was damaged on its way"))
                return
            path = uploaded["path"]
        uri = self._run.path("result", f"value-{self._number}.{result['format']}")

        def put() -> None:
            error = _place(path, uri, result["size"])
            fingerprint = None if error else fingerprint_of(uri, result["format"])
            stored = {"type": RESULT_STORED, "rank": rank, "result": result, "uri": uri, "error": error}
            self._send({**stored, "fingerprint": fingerprint})

        if self._run.is_remote or "value" not in result:
            # In the thread that talks to the store: the driver goes on looking for failures and cancels.
            self._committer.do(put)
        else:
            put()

    def sweep(self) -> None:
        """Has deleted what this attempt left at the store: parts of checkpoints, value, rows. It has failed now."""
        self._outcome.give_up()
        self._committer.sweep()
        attempts = range(self._number, self._number + 1)
        # In its thread, after what it has still committed.
        self._committer.do_as_owner(lambda: remove_rows(self._run, attempts, self._committer.tables))
        if self._run.is_remote:
            self._committer.do_as_owner(lambda: remove_values(self._run, attempts))

    def abort_uploads(self) -> None:
        """Has deleted what ranks of this attempt had begun to write, and began anew when the store was back."""
        begins = self._run.path(FOLDER, f"{self._number:04d}-"), self._run.path("result", f"value-{self._number}.")
        for begin in begins if self._run.is_remote else ():
            self._committer.do_as_owner(functools.partial(store.abort_uploads, begin))

    def on_stored(self, message: Message, metrics: dict[str, Any]) -> None:
        """Rank 0's value is in its place, or the store refused it.

        Args:
            message: Of the type `RESULT_STORED`.
            metrics: Rank 0's last ones, for the summary.
        """
        if message["error"]:
            self._outcome.refusal = verdict.not_stored(message["error"])
            return
        result = message["result"]
        summary = {**result["summary"], "metrics": dict(metrics)}
        ref = ResultRef(
            message["uri"], result["format"], result["digest"], result["size"], summary, message["fingerprint"]
        )
        self._outcome.note_result(message["rank"], ref, [result["value"]] if "value" in result else [])


def remove_values(run: RunDirectory, attempts: range) -> None:
    """Deletes from an object store the values that ranks of failed attempts wrote there, and what they had begun to."""
    begins = tuple(f"value-{attempt}." for attempt in attempts)
    for begin in begins:
        store.abort_uploads(run.path("result", begin))
    for name in store.list_names(run.path("result")) if begins else []:
        if name.startswith(begins):
            store.remove(run.path("result", name))


def _is_whole(uploaded: Message, part: Message) -> bool:
    # Of pieces the index has the checksums, and what came is authenticated.
    is_same = part["format"] == SHARDS or uploaded.get("digest") == part["sha256"]
    return bool(is_same and uploaded.get("size") == part["size"])


def _place(path: str, uri: str, size: int) -> str | None:
    """Moves the result into place, unless its rank has; what went wrong, in words, if the store refused to the end."""

    def place() -> None:
        if path != uri:
            store.upload(path, uri)
        elif (found := store.size(uri)) != size:
            raise OSError(f"{uri} has {found} bytes, not {size}")

    try:
        store.patiently(place, STORE_OUTAGE, _RESULT_INTERVAL, lambda _: not store.is_url(uri))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
