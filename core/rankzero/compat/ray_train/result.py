"""`Result`: the outcome of a run of the trainer. `Checkpoint`: a directory with a checkpoint, there or in a worker."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rankzero import store
from rankzero.errors import RankZeroError, ResultError
from rankzero.run.checkpoints import FOLDER, Manifest, score
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.values import formats


@dataclass(frozen=True)
class Result:
    """The outcome of a run: metrics, checkpoints, error and value.

    Attributes:
        metrics: Metrics of rank 0's last report; None if there was none.
        checkpoint: The newest checkpoint; None if there is none.
        error: The error of a failed run; None after a success.
        path: The run directory.
        best_checkpoints: The kept checkpoints with the metrics of their reports, the newest last.
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

        rows = RunHandle[Any].attach(self.path, follows=False).metrics()
        return pandas.DataFrame([row for row in rows if row["rank"] == 0]).drop(columns="rank", errors="ignore")

    @classmethod
    def from_path(cls, path: str) -> Result:
        """Returns the result of a run from its directory, whichever process started it; of one that lives, so far.

        Raises:
            RunNotFoundError: the directory has no run.
        """
        handle = RunHandle[Any].attach(path, follows=False)
        value: Any = None
        error: Exception | None = None
        if handle.status().certain:
            try:
                value = handle.result()
            except RankZeroError as failure:
                error = failure
        return result_of(handle, value, error)

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Returns the kept checkpoint with the best value of a reported metric; None if none has it.

        A value that is not a number is the worst.

        Args:
            metric: Name of the metric.
            mode: ``"max"`` or ``"min"``.
        """
        found = [(metrics, checkpoint) for checkpoint, metrics in self.best_checkpoints if metric in metrics]
        return max(found, key=lambda pair: score(pair[0], metric, mode))[1] if found else None


def result_of(handle: RunHandle[Any], value: Any, error: Exception | None = None) -> Result:
    """Returns the result of a run, with what it has reported so far."""
    run = RunDirectory(handle.directory)
    kept = [(_checkpoint(run, manifest), manifest.metrics) for manifest in handle.checkpoints()]
    metrics = None
    for event in handle.events():
        # The status has the last value of every metric, also of those that the last report left out.
        if event["type"] == "metric" and event["rank"] == 0:
            metrics = event["metrics"]
    return Result(metrics, kept[-1][0] if kept else None, error, handle.directory, kept, value)


def _checkpoint(run: RunDirectory, manifest: Manifest) -> Checkpoint:
    folder = run.path(FOLDER, manifest.id)

    def unpack(target: str) -> None:
        if not {part["format"] for part in manifest.parts.values()} <= {formats.DIRECTORY, formats.DISTRIBUTED}:
            raise ResultError(f"checkpoint {manifest.id} is a state, not a directory: rankzero.train reported it")
        os.makedirs(target, exist_ok=True)
        ranks: dict[str, str] = {}
        for rank, part in manifest.parts.items():
            # Beside the files that it becomes, so that they are moved and not copied.
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=target) as own:
                _unpack_part(store.join(folder, part["file"]), part["sha256"], own)
                for source, name in _tree(own):
                    merged = os.path.join(target, name)
                    if os.path.isdir(source):
                        os.makedirs(merged, exist_ok=True)
                    elif (first := ranks.setdefault(name, rank)) == rank or filecmp.cmp(source, merged, shallow=False):
                        os.replace(source, merged)
                    else:
                        raise ResultError(
                            f"checkpoint {manifest.id} has a {name} of rank {first} and another one of rank {rank}, "
                            "which one directory cannot hold: give the files of each rank their own names"
                        )

    return Checkpoint(folder, unpack)


def _unpack_part(file: str, digest: str, target: str) -> None:
    try:
        if not store.is_url(file):
            formats.read_directory(file, digest, target)
            return
        with tempfile.NamedTemporaryFile(prefix="rankzero-checkpoint-") as local:
            with store.open_read(file) as remote:
                shutil.copyfileobj(remote, local)
            local.flush()
            formats.read_directory(local.name, digest, target)
    except FileNotFoundError:
        raise ResultError(f"{file} was deleted, since its checkpoint is not kept") from None


def _tree(directory: str) -> Iterator[tuple[str, str]]:
    """Yields the paths of all directories and files below a directory, absolute and relative to it, parents first."""
    for folder, folders, files in os.walk(directory):
        for name in folders + files:
            path = os.path.join(folder, name)
            yield path, os.path.relpath(path, directory)


class Checkpoint:
    """A checkpoint that is a directory, with the interface of Ray's class.

    In a `Result`, one that was reported with ``sharded=True`` has the files of all workers.

    Attributes:
        path: Path of the directory; for a checkpoint of a run, its folder in the run directory.
    """

    def __init__(self, path: str | os.PathLike[str], unpack: Callable[[str], Any] | None = None) -> None:
        self.path = os.fspath(path)
        self._unpack = unpack

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Returns the checkpoint for a local directory.

        Raises:
            ValueError: the directory does not exist.
        """
        if not os.path.isdir(path):
            raise ValueError(f"checkpoint directory {os.fspath(path)!r} does not exist")
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the checkpoint to a local directory, by default a new temporary one, and returns its path.

        Raises:
            ResultError: the checkpoint is damaged, or was deleted since it is not kept; it is a state, or workers have
                given different files one name.
        """
        target = tempfile.mkdtemp(prefix="rankzero-checkpoint-") if path is None else os.fspath(path)
        if self._unpack:
            self._unpack(target)
        else:
            shutil.copytree(self.path, target, dirs_exist_ok=True)
        return target

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yields a local directory with the checkpoint, for the block. Raises like `to_directory`."""
        if self._unpack is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-") as directory:
            yield self.to_directory(directory)

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"
