"""`Folder`: files that a library writes, kept in the run directory, wherever that is."""

from __future__ import annotations

import os
import tempfile
import time

from rankzero import store

UPLOAD_INTERVAL = 60.0
"""Shortest time in seconds between two uploads to an object store, where nothing can be appended."""


class Folder:
    """A folder of a run directory that a library can write into; on an object store a copy of it on this host."""

    def __init__(self, location: str) -> None:
        """Makes the folder, empty.

        Args:
            location: Path or URL.
        """
        self._location = location
        self._scratch = tempfile.TemporaryDirectory(prefix="rankzero-") if store.is_url(location) else None
        # Of the same name, which some libraries want.
        self.path = os.path.join(self._scratch.name, os.path.basename(location)) if self._scratch else location
        self._uploaded = time.monotonic()
        self._sizes: dict[str, int] = {}
        store.remove(location)
        os.makedirs(self.path, exist_ok=True)

    def upload(self, *, now: bool = False) -> None:
        """Copies what has grown to the object store, now and then. Raises OSError and the store's own errors."""
        if self._scratch and (now or time.monotonic() - self._uploaded > UPLOAD_INTERVAL):
            self._uploaded = time.monotonic()
            for folder, _, names in os.walk(self.path):
                for name in names:
                    path = os.path.join(folder, name)
                    size = os.path.getsize(path)
                    if self._sizes.get(path) != size:
                        store.upload(path, store.join(self._location, os.path.relpath(path, self.path)))
                        self._sizes[path] = size

    def close(self) -> None:
        """Uploads the rest, and removes the copy."""
        try:
            self.upload(now=True)
        finally:
            if self._scratch:
                self._scratch.cleanup()
