"""`Scratch`: a driver's temporary directory for files on their way to an object store."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from rankzero.task.hold import lock_directory, remove_abandoned, scratch_root

_PREFIX = "rankzero-driver-"


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
        root = scratch_root()
        remove_abandoned(root, _PREFIX)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        lock = lock_directory(self.path)
        # An attempt that fails early does not call `remove`.
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Removes the directory and its lock."""
        self._remove()


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
