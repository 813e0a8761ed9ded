"""`Scratch`: a driver's directory for what is on its way to an object store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref

from rankzero.task.hold import scratch_root

NEW = 60.0
"""Seconds for which nobody but its driver locks a directory: it is being made."""

_PREFIX = "rankzero-driver-"


class Scratch:
    """A directory that is locked while its process lives; those of drivers that were killed are removed with it.

    By a lock, since drivers in several containers may share the place, where a process id says nothing.

    Attributes:
        path: The directory.
    """

    def __init__(self) -> None:
        """Makes the directory. Raises OSError if there is no room, RuntimeError if there is no place for it."""
        root = scratch_root()
        # A place may be one that can be written to and not be listed.
        with contextlib.suppress(OSError):
            _remove_left(root)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An attempt that fails before its agents are there calls nothing.
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Removes the directory."""
        self._remove()


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_left(root: str) -> None:
    for name in os.listdir(root):
        if not name.startswith(_PREFIX):
            continue
        # Other users' drivers have theirs there, too.
        with contextlib.suppress(OSError):
            directory = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(directory).st_mtime > NEW:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.join(root, name), ignore_errors=True)
            finally:
                os.close(directory)
