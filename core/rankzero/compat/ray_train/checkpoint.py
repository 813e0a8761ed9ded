"""`Checkpoint`: a directory with a checkpoint, in a worker or in the process that reads the run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any


class Checkpoint:
    """A checkpoint that is a directory, with the interface of Ray's class.

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
            ResultError: the checkpoint is damaged, or was deleted since it is not kept.
        """
        target = tempfile.mkdtemp(prefix="rankzero-checkpoint-") if path is None else os.fspath(path)
        if self._unpack:
            self._unpack(target)
        else:
            import shutil

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
