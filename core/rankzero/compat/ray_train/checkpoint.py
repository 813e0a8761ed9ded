"""`Checkpoint` and `Result`: what a run of a trainer leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rankzero import store
from rankzero.compat.ray_train.config import unsupported
from rankzero.errors import ResultError
from rankzero.run.checkpoints import read_manifests, score
from rankzero.run.handle import RunHandle
from rankzero.values import formats

if TYPE_CHECKING:
    import rankzero.train as rt

_unpacked: list[tempfile.TemporaryDirectory[str]] = []
"""Directories of checkpoints that were unpacked for their ``path``; deleted when the process exits."""


class Checkpoint:
    """A checkpoint that is a local directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if store.is_url(os.fspath(path)):
            raise unsupported(f"Checkpoint({os.fspath(path)!r}), a URL")
        self._path: str | None = os.fspath(path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Returns the checkpoint for a local directory. Raises ValueError if the directory does not exist."""
        if not os.path.isdir(path):
            raise ValueError(f"checkpoint directory {os.fspath(path)!r} does not exist")
        return cls(path)

    @property
    def path(self) -> str:
        """Path of a local directory with the files.

        A run keeps its checkpoints packed: the first access unpacks them into a directory that lives as long as the
        process. Raises like `to_directory`.
        """
        if self._path is None:
            _unpacked.append(_temporary())
            self._path = self.to_directory(_unpacked[-1].name)
        return self._path

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the checkpoint to a local directory, by default a new temporary one, and returns its path.

        Raises ResultError if the checkpoint is damaged, was deleted since it is not kept, or is a state.
        """
        target = tempfile.mkdtemp(prefix="rankzero-checkpoint-") if path is None else os.fspath(path)
        self._copy(target)
        return target

    def _copy(self, target: str) -> None:
        shutil.copytree(self.path, target, dirs_exist_ok=True)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yields a local directory with the checkpoint, for the block. Raises like `to_directory`."""
        with contextlib.nullcontext(self._path) if self._path else _temporary() as directory:
            yield self._path or self.to_directory(directory)


class StoredCheckpoint(Checkpoint):
    """A checkpoint in the folder of a submission, with packed files; ``opened`` is it as a worker of the run has it."""

    def __init__(self, place: str, name: str, opened: rt.Checkpoint | None = None) -> None:
        self._path = None
        self._place, self._name, self._opened = place, name, opened

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredCheckpoint, (self._place, self._name)

    def _copy(self, target: str) -> None:
        # Of files with one name, rank 0's is written last.
        if self._opened is not None:
            for rank in reversed(range(self._opened.world_size)) if self._opened.sharded else [None]:
                self._opened.to_directory(target, rank)
            return
        found = read_manifests(self._place, [self._name])
        if not found:
            raise ResultError(f"checkpoint {self._name} of {self._place} was deleted, since it is not kept")
        for part in reversed(found[0].parts.values()):
            if part["format"] != formats.DIRECTORY:
                raise ResultError(f"checkpoint {self._name} is a state, not a directory: rankzero.train reported it")
            _unpack(store.join(found[0].folder, part["file"]), part["sha256"], target)


def _unpack(file: str, digest: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    if not store.is_url(file):
        formats.read_directory(file, digest, target)
        return
    with tempfile.NamedTemporaryFile(prefix="rankzero-checkpoint-") as local:
        with store.open_read(file) as remote:
            shutil.copyfileobj(remote, local)
        local.flush()
        formats.read_directory(local.name, digest, target)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    # The agent of a worker has checked that this directory has room.
    return tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-", dir=os.environ.get("RANKZERO_SCRATCH"))


@dataclass(frozen=True)
class Result:
    """The outcome of a run: metrics, checkpoints, error and value.

    Attributes:
        metrics: Metrics of rank 0's last report; None if there was none.
        checkpoint: The newest checkpoint; None if there is none.
        error: The error of a failed run; None after a success.
        path: The run directory.
        best_checkpoints: The kept checkpoints with the metrics of their reports. By ``checkpoint_score_attribute`` the
            best is the last one; without it the newest is.
        return_value: The value that the training function returned on rank 0, which may contain tensors.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    return_value: Any = None

    @property
    def metrics_dataframe(self) -> Any:
        """Returns rank 0's reports as a `pandas.DataFrame`."""
        import pandas

        reports = _reports(RunHandle[Any].attach(self.path, follows=False))
        return pandas.DataFrame([{"time": event["time"], **event["metrics"]} for event in reports])


def result_of(handle: RunHandle[Any], value: Any) -> Result:
    """Returns the result of a run that has succeeded."""
    config = handle.job.checkpoints
    kept: list[tuple[Checkpoint, dict[str, Any]]] = [
        (StoredCheckpoint(each.place, each.id), each.metrics) for each in handle.checkpoints()
    ]
    newest = kept[-1][0] if kept else None
    if metric := config.get("metric"):
        kept.sort(key=lambda pair: score(pair[1], metric, config["mode"]))
    # The status has the last value of every metric, also of those that the last report left out.
    metrics = [each["metrics"] for each in _reports(handle)][-1:]
    return Result(metrics[0] if metrics else None, newest, None, handle.directory, kept, value)


def _reports(handle: RunHandle[Any]) -> list[dict[str, Any]]:
    """Returns the events of rank 0's reports."""
    return [event for event in handle.events() if event["type"] == "metric" and event["rank"] == 0]
