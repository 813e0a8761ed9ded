"""`CheckpointWriter`: writes a rank's checkpoints in a thread while training continues."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from rankzero import bounds
from rankzero.channel import messages
from rankzero.errors import ResultError
from rankzero.host.processes import unnamed_file
from rankzero.run.checkpoints import loaded_sources
from rankzero.train import sharded as sharding
from rankzero.train.checkpoint import Checkpoint
from rankzero.train.parts import NotTakenError, Parts
from rankzero.values import formats


class CheckpointWriter:
    """Writes this rank's parts and knows which checkpoint was committed last.

    Training waits only until the state is copied in memory; a thread writes the copy. There is one copy at a time: the
    next report waits until the previous copy is written, and until the driver has it if it passes through the driver.
    """

    def __init__(
        self,
        parts: Parts,
        attempt: int,
        rank: int,
        world_size: int,
        send: Callable[[messages.Message], None],
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares the writer of one attempt; ``flush`` waits until the agent has all messages that were sent."""
        self._parts = parts
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._send = send
        self._flush = flush
        self._next = self._writing = 0
        self._settled = self._staged = -1
        self._sharded: bool | None = None
        self._waiting: deque[tuple[dict[str, Any], IO[bytes]]] = deque()
        self._failure: ResultError | None = None
        self._thread: threading.Thread | None = None
        self._busy = False
        self._changed = threading.Condition()
        self._last: Checkpoint | None = None
        # Ranks report in step, so few of rank 0's are ahead.
        self._coming: deque[tuple[int, Checkpoint]] = deque(maxlen=8)
        self.had_result = False
        """True if rank 0 had set the value of the run before the checkpoint that this attempt started from."""

    @property
    def busy(self) -> bool:
        """Returns True while training waits for a checkpoint to be written or read, which is no hang."""
        return self._busy or self._parts.is_being_read

    @property
    def last(self) -> Checkpoint | None:
        """Returns the last committed checkpoint that this rank has reported, too, or the one of the start."""
        while self._coming and self._coming[0][0] < self._next:
            self._last = self._coming.popleft()[1]
        return self._last

    @property
    def count(self) -> int:
        """Returns how many checkpoints this rank has reported, or has been told of if only others report any."""
        return self._next or self._settled + 1

    def follow(self) -> None:
        """Counts a whole checkpoint that rank 0 reports, so that this rank can wait for it and receives it."""
        self._next += 1

    def write(
        self, value: object, metrics: dict[str, Any], when: float, *, sharded: bool, has_result: bool = False
    ) -> None:
        """Copies a checkpoint of a report, which is written while training continues. Raises like `report`.

        ``has_result`` is True if this rank has set the value of the run in this attempt.
        """
        directory = _directory(value)
        sharded = sharded or (directory is None and sharding.has_sharded(value))
        if self._sharded is None:
            self._sharded = sharded
        elif self._sharded != sharded:
            raise ValueError("checkpoints of one run are either all sharded or all whole (report(..., sharded=...))")
        if not sharded and self._rank != 0:
            self.follow()
            return
        index, self._next = self._next, self._next + 1
        facts = {"id": self._name(index), "index": index, "sharded": sharded, "metrics": metrics, "time": when}
        facts["has_result"] = has_result or self.had_result
        try:
            with self._blocking():
                self._await_written()
                if not self._await(self._staged):
                    raise NotTakenError(
                        f"{self._name(self._staged)} is not committed after {bounds.CHECKPOINT_COMMIT_TIMEOUT():g} s, "
                        "and this host holds no more: every rank has to report each sharded checkpoint, and the driver "
                        "has to reach the store"
                    )
                source = self._take(value, directory, facts)
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name="rankzero-checkpoints", daemon=True)
                    thread.start()
                    self._thread = thread
        except NotTakenError as error:
            self._fail(index, error)
            return
        except BaseException as error:
            self._send(messages.Lost(index))
            if not isinstance(error, OSError):
                raise
            raise ResultError(f"checkpoint {facts['id']} of rank {self._rank} cannot be written: {error}") from error
        with self._changed:
            # Only what is in the queue counts as waiting: a signal handler may have reported or raised before.
            self._waiting.append((facts, source))
            self._changed.notify_all()

    def _take(self, value: Any, directory: str | None, facts: dict[str, Any]) -> IO[bytes]:
        """Returns a copy of a checkpoint as an open file, and adds facts about it.

        It starts no thread: a signal handler may report, too, and would wait for a lock of the code that it interrupts.
        """
        if directory is not None:
            # The training function may delete the directory when `report` returns.
            facts["format"] = formats.DIRECTORY
            source = self._parts.archive(directory)
        else:
            source = unnamed_file()
            is_sharded = sharding.has_sharded(value)
            stored, own = (sharding.split(value), formats.PICKLE) if is_sharded else (value, formats.choose(value))
            facts["format"] = formats.SHARDS if is_sharded else own
            formats.dump(stored, own, source)
        facts["file"] = f"rank-{self._rank}.{facts['format']}"
        return source

    def finish(self) -> None:
        """Waits until all copied checkpoints are written. Raises ResultError if the disk has refused one."""
        with self._blocking():
            self._await_written()

    def await_settled(self) -> None:
        """Waits for the last checkpoint like `await_checkpoint`, at most `CHECKPOINT_COMMIT_TIMEOUT` seconds."""
        with self._blocking():
            if not self._await(self._next - 1):
                name, bound = self._name(self._next - 1), bounds.CHECKPOINT_COMMIT_TIMEOUT()
                print(f"rankzero: checkpoint {name} is not complete after {bound:.0f} s, no longer awaited")

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _await(self, index: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._settled >= index, bounds.CHECKPOINT_COMMIT_TIMEOUT())

    def _await_written(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing))
            failure, self._failure = self._failure, None
        if failure:
            raise failure

    def _name(self, index: int) -> str:
        return f"{self._attempt:04d}-{index:06d}"

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._writing += 1
                facts, source = self._waiting.popleft()
            try:
                # Closing it frees the memory before the next report may copy.
                with source:
                    self._write(facts, source)
            finally:
                with self._changed:
                    self._writing -= 1
                    self._changed.notify_all()

    def _write(self, facts: dict[str, Any], source: IO[bytes]) -> None:
        try:
            facts["loaded"] = {} if self._rank else loaded_sources()
            facts["size"] = os.fstat(source.fileno()).st_size
            facts["sha256"], facts["upload"] = self._parts.write(facts["id"], facts["file"], source)
            if facts["upload"]:
                self._staged = facts["index"]
            self._send(messages.Part(**facts))
            # This part is not lost if the process is killed once the next report has returned.
            self._flush()
        except Exception as error:
            self._fail(facts["index"], error)

    def _fail(self, index: int, error: Exception) -> None:
        """Reports a part that failed to the driver, and to the next report unless it may be written next time."""
        self._send(messages.Lost(index))
        name = f"checkpoint {self._name(index)} of rank {self._rank}"
        if isinstance(error, NotTakenError):
            print(f"rankzero: {name} is left out: {error}; the previous one is complete")
        else:
            is_known = isinstance(error, ResultError)
            self._failure = error if is_known else ResultError(f"{name} cannot be written: {error}")  # type: ignore[assignment]

    def on_message(self, message: messages.Message) -> None:
        """Handles a message of the driver about a checkpoint."""
        if isinstance(message, messages.Committed):
            self.committed(message.manifest)
        elif isinstance(message, messages.Lost):
            self._settle(message.index)

    def committed(self, manifest: Mapping[str, Any]) -> None:
        """Records a committed checkpoint, or the one that the attempt starts from.

        Rank 0's may be committed before another rank's report of the same number, which then has it.
        """
        facts = manifest["id"], manifest["metrics"], manifest["world_size"], manifest["sharded"]
        note_damage = functools.partial(self._send, messages.Damaged(manifest["id"]))
        found = Checkpoint(*facts, self._rank, self._world_size, manifest, self._parts, note_damage)
        if manifest["attempt"] != self._attempt:
            self._last = found
            self.had_result = manifest.get("has_result", False)
        else:
            self._coming.append((manifest["index"], found))
            # At the end, since it lets `await_settled` return, after which the rank may ask for this checkpoint.
            self._settle(manifest["index"])

    def _settle(self, index: int) -> None:
        """Records that the checkpoints up to a number are committed or have failed."""
        with self._changed:
            self._settled = max(self._settled, index)
            if not self._parts.shared:
                # The newest one stays for `get_checkpoint`; the previous one may be open at the moment.
                shutil.rmtree(self._parts.folder(self._name(index - 2)), ignore_errors=True)
            self._changed.notify_all()


def _directory(value: object) -> str | None:
    """Returns the path of a reported checkpoint that is a directory; None for a dict. Raises TypeError for neither."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if not isinstance(path, str) or not os.path.isdir(path):
            raise TypeError(f"checkpoint is {value!r}; there is no such directory")
        return path
    if isinstance(value, dict):
        return None
    raise TypeError(f"checkpoint is of type {type(value).__name__}; give a directory or a dict of tensors and values")
