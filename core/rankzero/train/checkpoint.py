"""A rank's checkpoints: writing one so that training goes on at once, and opening the last committed one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankzero.errors import ResultError
from rankzero.values import formats

MAX_STAGED = 2
"""Checkpoints that wait on this host for their way to the driver before the next one has to wait."""

KEPT_STAGED = 2
"""Committed checkpoints of this rank that stay on this host where the store is out of its sight."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of this run.

    Attributes:
        id: Its name.
        metrics: What rank 0 reported with it.
        world_size: Number of ranks that ran then.
        sharded: Every rank gave a part of its own.
    """

    id: str
    metrics: dict[str, Any]
    world_size: int
    sharded: bool
    _rank: int = field(repr=False)
    _parts: dict[str, dict[str, Any]] = field(repr=False)
    _here: dict[str, str] = field(repr=False)

    def load(self, rank: int | None = None) -> Any:
        """The state that was given to `rankzero.train.report`; tensors on the CPU.

        Args:
            rank: Whose part of a sharded checkpoint; None for this rank's.

        Raises:
            ResultError: the file is damaged or not within reach, or a directory was given.
        """
        part, path = self._part(rank)
        if part["format"] == formats.DIRECTORY:
            raise ResultError(f"checkpoint {self.id} is a directory: use as_directory() or to_directory(path)")
        with self._still_there():
            return formats.read(path, part["format"], part["sha256"])

    def to_directory(self, path: str | os.PathLike[str], rank: int | None = None) -> str:
        """Copies a checkpoint that was given as a directory to ``path``, which is made if need be.

        Args:
            path: Local directory.
            rank: Whose part of a sharded checkpoint; None for this rank's.

        Returns:
            The directory.

        Raises:
            ResultError: the file is damaged or not within reach, or a state was given.
        """
        part, file = self._part(rank)
        if part["format"] != formats.DIRECTORY:
            raise ResultError(f"checkpoint {self.id} is a state, not a directory: use load()")
        target = os.fspath(path)
        os.makedirs(target, exist_ok=True)
        with self._still_there():
            formats.read_directory(file, part["sha256"], target)
        return target

    @contextlib.contextmanager
    def as_directory(self, rank: int | None = None) -> Iterator[str]:
        """A temporary local copy, removed at the end of the block. Like `to_directory`."""
        # Where its agent has room.
        scratch = os.environ.get("RANKZERO_SCRATCH")
        with tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-", dir=scratch) as directory:
            yield self.to_directory(directory, rank)

    @contextlib.contextmanager
    def _still_there(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ResultError(
                f"checkpoint {self.id} is not kept any more: ask get_checkpoint() for the newest"
            ) from None

    def _part(self, rank: int | None) -> tuple[dict[str, Any], str]:
        name = str((self._rank if rank is None else rank) if self.sharded else 0)
        if name not in self._parts:
            raise ResultError(f"checkpoint {self.id} of {self.world_size} ranks has no part of rank {name}")
        if name not in self._here:
            raise ResultError(f"the part of rank {name} of checkpoint {self.id} is not within reach of this host")
        return self._parts[name], self._here[name]


class CheckpointWriter:
    """Writes this rank's parts and knows which checkpoint was committed last."""

    def __init__(
        self, directory: str, attempt: int, rank: int, send: Callable[[Message], None], *, shared: bool
    ) -> None:
        """Prepares the writer of one attempt.

        Args:
            directory: Where parts are written: in the run directory if this host sees it, else a scratch directory
                from where the agent sends them.
            attempt: Number of the attempt.
            rank: Global rank.
            send: Passes a message to the agent.
            shared: ``directory`` is the run's own.
        """
        self._directory = directory
        self._attempt = attempt
        self._rank = rank
        self._send = send
        self._shared = shared
        self._next = 0
        self._sharded: bool | None = None
        self._staged: dict[int, str] = {}
        self._kept: deque[str] = deque()
        self.busy = False
        """A checkpoint is being written: slow, but no hang."""
        self._changed = threading.Condition()
        self._last: Checkpoint | None = None

    @property
    def last(self) -> Checkpoint | None:
        """The last committed checkpoint that this rank has heard of."""
        return self._last

    def write(self, value: object, metrics: dict[str, Any], when: float, *, sharded: bool) -> None:
        """Writes this rank's part and delivers it to be committed.

        Raises:
            TypeError: neither a directory nor a dict.
            ValueError: sharded and whole checkpoints in one run.
            ResultError: it cannot be pickled, or the disk refuses it; the checkpoint before it is whole.
        """
        directory = _as_directory(value)
        if self._sharded is None:
            self._sharded = sharded
        elif self._sharded != sharded:
            raise ValueError("checkpoints of one run are either all sharded or all whole (report(..., sharded=...))")
        if not sharded and self._rank != 0:
            if self._next == 0:
                print(f"rankzero: rank 0's checkpoints are kept, not those of rank {self._rank} (see sharded=True)")
                self._next = 1
            return
        index, self._next = self._next, self._next + 1
        self.busy = True
        try:
            self._write_part(index, value, directory, metrics, when, sharded)
        finally:
            self.busy = False

    def _write_part(
        self, index: int, value: object, directory: str | None, metrics: dict[str, Any], when: float, sharded: bool
    ) -> None:
        if not self._shared:
            self._await_room()
        file_format = formats.DIRECTORY if directory else formats.choose(value)
        name, file = f"{self._attempt:04d}-{index:06d}", f"rank-{self._rank}.{file_format}"
        folder = os.path.join(self._directory, name)
        path = os.path.join(folder, file)
        try:
            os.makedirs(folder, exist_ok=True)
            size, sha256 = self._write_file(directory, value, file_format, path)
        except OSError as error:
            self._send({"type": "checkpoint-failed", "index": index})
            raise ResultError(f"checkpoint {name} of rank {self._rank} cannot be written: {error}") from error
        facts = {"format": file_format, "size": size, "sha256": sha256, "path": path, "shared": self._shared}
        with self._changed:
            self._staged[index] = path
        self._send(
            {
                "type": "checkpoint",
                "id": name,
                "index": index,
                "file": file,
                **facts,
                "sharded": sharded,
                "metrics": metrics,
                "time": when,
            }
        )

    @staticmethod
    def _write_file(directory: str | None, value: object, file_format: str, path: str) -> tuple[int, str]:
        writing = f"{path}.writing"
        try:
            if directory:
                facts = formats.write_directory(directory, writing)
            else:
                facts = formats.write(value, file_format, writing)
            os.replace(writing, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(writing)
        return facts

    def _await_room(self) -> None:
        """A disk that fills faster than the driver empties it must not run full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._staged) < MAX_STAGED)

    def on_message(self, message: Message) -> None:
        """What the driver reports about a checkpoint."""
        if message["type"] == "checkpoint":
            self.committed(message["manifest"], {})
        elif message["type"] == "checkpoint-lost":
            self._forget(message["index"])

    def committed(self, manifest: Mapping[str, Any], here: Mapping[str, str]) -> None:
        """Notes the newest committed checkpoint, or the one that the attempt starts from.

        A rank that has given none in this attempt keeps the one it started from: all ranks resume from the same.

        Args:
            manifest: The fields of `rankzero.run.checkpoints.Manifest`.
            here: By rank, as text: local files of parts.
        """
        own = manifest["attempt"] == self._attempt
        if own:
            self._forget(manifest["index"])
        if own and self._next == 0:
            return
        found = dict(here)
        for rank, part in manifest["parts"].items():
            path = os.path.join(self._directory, manifest["id"], part["file"])
            if os.path.exists(path):
                found.setdefault(rank, path)
        self._last = Checkpoint(
            manifest["id"],
            manifest["metrics"],
            manifest["world_size"],
            manifest["sharded"],
            self._rank,
            manifest["parts"],
            found,
        )

    def _forget(self, index: int) -> None:
        """This checkpoint is committed or failed: earlier staged ones are of no use to anybody."""
        with self._changed:
            for number in [number for number in self._staged if number <= index]:
                folder = os.path.dirname(self._staged.pop(number))
                if not self._shared:
                    # The newest stay for `get_checkpoint`; the one before may be open just now.
                    self._kept.append(folder)
                    while len(self._kept) > KEPT_STAGED:
                        shutil.rmtree(self._kept.popleft(), ignore_errors=True)
            self._changed.notify_all()


def _as_directory(value: object) -> str | None:
    """The path of a directory; None for a dict."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if not isinstance(path, str) or not os.path.isdir(path):
            raise TypeError(f"checkpoint is {value!r}; there is no such directory")
        return path
    if isinstance(value, dict):
        return None
    raise TypeError(f"checkpoint is a {type(value).__name__}; give a directory, or a dict of tensors and plain values")
