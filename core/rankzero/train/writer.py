"""`CheckpointWriter`: writes a rank's checkpoints in a thread while training continues."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rankzero import bounds, store
from rankzero.channel import messages
from rankzero.errors import ResultError
from rankzero.train import snapshot
from rankzero.train.checkpoint import Checkpoint, as_directory
from rankzero.train.parts import NotTakenError, Parts, copy_file
from rankzero.values import formats
from rankzero.values import sharded as sharding

MAX_STAGED = 2
"""Checkpoints that may wait on this host to be sent to the driver; the next one waits until there are fewer."""

KEPT_STAGED = 2
"""Committed checkpoints of this rank that stay on a host that does not see the store."""


@dataclass(frozen=True)
class _Taken:
    """A copied checkpoint, which shares no memory with the training.

    Attributes:
        index: Number of the checkpoint in this attempt.
        name: Id of the checkpoint.
        state: A copy of the state; None for a directory.
        path: The archive of a directory; None for a state.
        facts: Facts for the message to the driver, except those about the file.
    """

    index: int
    name: str
    state: Any
    path: str | None
    facts: dict[str, Any]


class CheckpointWriter:
    """Writes this rank's parts and knows which checkpoint was committed last.

    Training waits only until the state is copied in memory; a thread writes the copy. There is one copy at a time: the
    next report waits until the previous copy is written.
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
        """Prepares the writer of one attempt.

        Args:
            parts: Writes and reads parts.
            attempt: Number of the attempt.
            rank: Global rank.
            world_size: Number of ranks.
            send: Sends a message to the agent, perhaps later.
            flush: Waits until the agent has all messages.
        """
        self._parts = parts
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._send = send
        self._flush = flush
        self._next = 0
        self._settled = -1
        self._sharded: bool | None = None
        self._staged: set[int] = set()
        self._kept: deque[str] = deque()
        self._waiting: deque[_Taken] = deque()
        self._writing = 0
        self._failure: ResultError | None = None
        self._thread: threading.Thread | None = None
        self._busy = False
        self._changed = threading.Condition()
        self._first: Checkpoint | None = None
        self._last: Checkpoint | None = None
        self.had_result = False
        """True if rank 0 had set the value of the run before the checkpoint that this attempt started from."""

    @property
    def busy(self) -> bool:
        """Returns True while training waits for a checkpoint to be written or read, which is no hang."""
        return self._busy or self._parts.is_being_read

    @property
    def last(self) -> Checkpoint | None:
        """Returns the last committed checkpoint, or the one of the start until this rank has reported one."""
        return self._last if self._next > 0 else self._first

    @property
    def count(self) -> int:
        """Returns how many checkpoints this rank has reported, or has been told of if only others report any."""
        return self._next or self._settled + 1

    def follow(self) -> None:
        """Counts a whole checkpoint that rank 0 reports, so that this rank can wait for it and receives it."""
        self._next += 1

    def write(
        self,
        value: object,
        metrics: dict[str, Any],
        when: float,
        *,
        sharded: bool,
        has_result: bool = False,
        positions: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Copies a checkpoint, which is written and committed while training continues.

        Args:
            value: The checkpoint.
            metrics: Metrics of its report.
            when: Unix time of its report.
            sharded: Whether every rank gives a part.
            has_result: Whether this rank has set the value of the run in this attempt.
            positions: Positions in datasets that the checkpoint may hold.

        Raises:
            TypeError: the checkpoint is neither a directory nor a dict.
            ValueError: sharded and whole checkpoints in one run.
            ResultError: the checkpoint cannot be pickled, or the disk has refused it or the previous one.
        """
        directory = as_directory(value)
        sharded = sharded or (directory is None and sharding.has_sharded(value))
        if self._sharded is None:
            self._sharded = sharded
        elif self._sharded != sharded:
            raise ValueError("checkpoints of one run are either all sharded or all whole (report(..., sharded=...))")
        if not sharded and self._rank != 0:
            self.follow()
            return
        index, self._next = self._next, self._next + 1
        # From here on the agent gives this process its grace to finish, however the attempt ends.
        self._send(messages.PartBegun(index))
        self._busy = True
        try:
            self._start_thread()
            self._await_room()
            facts = {"sharded": sharded, "metrics": metrics, "time": when, "has_result": has_result or self.had_result}
            facts["positions"] = dict(positions)
            taken = self._take(index, value, directory, facts)
        except NotTakenError as error:
            self._send(messages.PartFailed(index))
            self._note_not_taken(self._name(index), error)
            return
        except BaseException as error:
            self._send(messages.PartFailed(index))
            if not isinstance(error, OSError):
                raise
            raise ResultError(
                f"checkpoint {self._name(index)} of rank {self._rank} cannot be written: {error}"
            ) from error
        finally:
            self._busy = False
        with self._changed:
            # Only what is in the queue counts as waiting: a signal handler may have reported or raised before.
            self._waiting.append(taken)
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits until all copied checkpoints are written. Raises ResultError if the disk has refused one."""
        self._busy = True
        try:
            self._await_written()
        finally:
            self._busy = False

    def await_settled(self) -> None:
        """Waits until the last checkpoint that this rank has reported is committed or has failed.

        With whole checkpoints, other ranks than 0 wait for the one that rank 0 reports in its call of the same number.
        The wait lasts as long as the driver tries to store the checkpoint, at most `CHECKPOINT_COMMIT_TIMEOUT` seconds.
        """
        self._busy = True
        try:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._settled >= self._next - 1, bounds.CHECKPOINT_COMMIT_TIMEOUT()
                ):
                    name, bound = self._name(self._next - 1), bounds.CHECKPOINT_COMMIT_TIMEOUT()
                    print(f"rankzero: checkpoint {name} is not complete after {bound:.0f} s, no longer awaited")
        finally:
            self._busy = False

    def _name(self, index: int) -> str:
        return f"{self._attempt:04d}-{index:06d}"

    def _take(self, index: int, value: Any, directory: str | None, facts: dict[str, Any]) -> _Taken:
        name = self._name(index)
        if directory is None:
            state, has_shards = snapshot.take(value)
            file_format = formats.SHARDS if has_shards else formats.choose(state)
            return _Taken(index, name, state, None, {**facts, "format": file_format})
        # The training function may delete the directory when `report` returns.
        is_distributed = facts["sharded"] and formats.is_distributed(directory)
        file_format = formats.DISTRIBUTED if is_distributed else formats.DIRECTORY
        path = self._parts.local_path(name, self._file(file_format))
        writing = store.temporary_beside(path)
        try:
            size, sha256 = formats.write_directory(directory, writing)
            self._parts.check_directory()
            os.replace(writing, path)
        except (OSError, ResultError):
            store.remove(writing)
            raise
        return _Taken(index, name, None, path, {**facts, "format": file_format, "size": size, "sha256": sha256})

    def _file(self, file_format: str) -> str:
        return f"rank-{self._rank}.{file_format}"

    # -- the thread ------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="rankzero-checkpoints", daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            self._write(self._next_waiting())

    def _next_waiting(self) -> _Taken:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            self._writing += 1
            return self._waiting.popleft()

    def _write(self, taken: _Taken) -> None:
        file = self._file(taken.facts["format"])
        try:
            facts = self._write_part(taken, file)
            if not facts["shared"]:
                with self._changed:
                    self._staged.add(taken.index)
            self._send(messages.Part(id=taken.name, index=taken.index, file=file, **{**taken.facts, **facts}))
        except Exception as error:
            self._send(messages.PartFailed(taken.index))
            self._note_failure(taken, error)
        else:
            # This part is not lost if the process is killed once the next report has returned.
            self._flush()
        finally:
            # Freed before the next report may copy, since there would be two copies in memory.
            del taken
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _write_part(self, taken: _Taken, file: str) -> dict[str, Any]:
        if taken.path is None:
            produce = functools.partial(snapshot.write_to, taken.state, taken.facts["format"])
            return self._parts.write(taken.name, file, produce)
        if self._parts.shared or not self._parts.client():
            return {"path": taken.path, "shared": self._parts.shared}
        facts = {key: taken.facts[key] for key in ("size", "sha256")}
        written = {**facts, **self._parts.write(taken.name, file, functools.partial(copy_file, taken.path))}
        if written["path"] != taken.path:
            store.remove(taken.path)
        return written

    def _note_failure(self, taken: _Taken, error: Exception) -> None:
        if isinstance(error, NotTakenError):
            self._note_not_taken(taken.name, error)
            return
        text = f"checkpoint {taken.name} of rank {self._rank} cannot be written: {error}"
        with self._changed:
            self._failure = error if isinstance(error, ResultError) else ResultError(text)

    def _note_not_taken(self, name: str, error: NotTakenError) -> None:
        print(f"rankzero: checkpoint {name} of rank {self._rank} is left out: {error}; the previous one is complete")

    def _await_room(self) -> None:
        """Waits until the previous copy is written, and until the scratch disk holds fewer than `MAX_STAGED` copies.

        Raises:
            NotTakenError: the copies were not committed within `CHECKPOINT_COMMIT_TIMEOUT` seconds.
            ResultError: the previous copy could not be written.
        """
        self._await_written()
        if self._parts.shared:
            return
        bound = bounds.CHECKPOINT_COMMIT_TIMEOUT()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._staged) < MAX_STAGED, bound):
                waiting = ", ".join(map(self._name, sorted(self._staged)))
                raise NotTakenError(
                    f"after {bound:g} s {waiting} is not committed, and this host holds no more: every rank has to "
                    "report each sharded checkpoint, and the driver has to reach the store"
                )

    def _await_written(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing))
            failure, self._failure = self._failure, None
        if failure:
            raise failure

    # -- the driver ------------------------------------------------------------------------------

    def on_message(self, message: messages.Message) -> None:
        """Handles a message of the driver about a checkpoint."""
        if isinstance(message, messages.Committed):
            self.committed(message.manifest)
        elif isinstance(message, messages.NotCommitted):
            self._forget(message.index)

    def committed(self, manifest: Mapping[str, Any]) -> None:
        """Records the newest committed checkpoint, or the one that the attempt starts from.

        Rank 0's checkpoint may be committed before another rank's report of the same number. That rank has the
        checkpoint once its own report returns.

        Args:
            manifest: The facts from `rankzero.run.checkpoints.Manifest.for_ranks` for this task.
        """
        own = manifest["attempt"] == self._attempt
        self._last = Checkpoint(
            manifest["id"],
            manifest["metrics"],
            manifest["world_size"],
            manifest["sharded"],
            self._rank,
            self._world_size,
            self._parts.listed(manifest),
            self._parts,
            functools.partial(self._send, messages.Damaged(manifest["id"])),
        )
        if not own:
            self._first = self._last
            self.had_result = manifest.get("has_result", False)
        if own:
            # At the end, since it lets `await_settled` return, after which the rank may ask for this checkpoint.
            self._forget(manifest["index"])

    def _forget(self, index: int) -> None:
        """Forgets the staged copies up to a checkpoint that is committed or has failed."""
        with self._changed:
            self._settled = max(self._settled, index)
            for number in [number for number in self._staged if number <= index]:
                self._staged.discard(number)
                if not self._parts.shared:
                    # The newest ones stay for `get_checkpoint`; the previous one may be open at the moment.
                    self._kept.append(self._parts.folder(self._name(number)))
                    while len(self._kept) > KEPT_STAGED:
                        shutil.rmtree(self._kept.popleft(), ignore_errors=True)
            self._changed.notify_all()
