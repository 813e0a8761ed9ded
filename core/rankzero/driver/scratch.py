"""`Scratch`: a driver's directory for what is on its way to an object store."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from rankzero.task.hold import lock_directory, remove_abandoned, scratch_root

_PREFIX = "rankzero-driver-"


class Scratch:
    """A directory that is locked while its process lives; those of drivers that were killed are removed with it.

    Attributes:
        path: The directory.
    """

    def __init__(self) -> None:
        """Makes the directory. Raises OSError if there is no room, RuntimeError if there is no place for it."""
        root = scratch_root()
        remove_abandoned(root, _PREFIX)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        lock = lock_directory(self.path)
        # An attempt that fails before its agents are there calls nothing.
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Removes the directory."""
        self._remove()


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
