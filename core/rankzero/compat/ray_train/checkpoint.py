"""`Checkpoint`: a directory, in a worker and where the run is read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any


class Checkpoint:
    """A directory of the user's, as Ray has it.

    Attributes:
        path: Where it lies; for one of a run, its folder in the run directory.
    """

    def __init__(self, path: str | os.PathLike[str], unpack: Callable[[str], Any] | None = None) -> None:
        self.path = os.fspath(path)
        self._unpack = unpack

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint that a local directory is.

        Raises:
            ValueError: there is no such directory.
        """
        if not os.path.isdir(path):
            raise ValueError(f"checkpoint directory {os.fspath(path)!r} does not exist")
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies it to a local directory, by default a new temporary one. Returns the directory.

        Raises:
            ResultError: it is damaged, or not kept any more.
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
        """A local directory with it, for the block. Raises like `to_directory`."""
        if self._unpack is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-") as directory:
            yield self.to_directory(directory)

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"
