"""A cache, on each executor, of archives of the user's code: by content, the least recently used are deleted."""

from __future__ import annotations

import contextlib
import os
import secrets

from rankzero.values.digest import digest_of_file

KEPT = 4
"""Most files in the cache; each has at most 64 MiB."""


class KeptFiles:
    """A cache directory in one of Spark's local directories, which Spark deletes with the executor.

    Outside of Spark's local directories, nothing is cached.
    """

    def __init__(self, scratch: str) -> None:
        local = os.path.dirname(scratch)
        self._is_removed = local in os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        self._place = os.path.join(local, f"rankzero-files-{os.geteuid()}")

    def take(self, digest: str, path: str) -> bool:
        """Links the cached file with this digest to ``path``; returns True if there is one.

        Another agent may then delete the cached file: the link keeps the data.
        """
        kept = self._path(digest)
        try:
            if not self._is_ours():
                return False
            os.link(kept, path)
            if digest_of_file(path) == digest:
                os.utime(kept)
                return True
            os.unlink(path)
            os.unlink(kept)
        except OSError:
            pass
        return False

    def keep(self, digest: str, path: str) -> None:
        """Adds a file whose digest was verified, and deletes the least recently used files beyond `KEPT`."""
        with contextlib.suppress(OSError):
            if self._is_removed:
                os.makedirs(self._place, 0o700, exist_ok=True)
            if not self._is_ours():
                return
            unfinished = f"{self._path(digest)}.{secrets.token_hex(4)}"
            os.link(path, unfinished)
            os.replace(unfinished, self._path(digest))
            files = [os.path.join(self._place, name) for name in os.listdir(self._place)]
            for superfluous in sorted(files, key=os.path.getmtime, reverse=True)[KEPT:]:
                os.unlink(superfluous)

    def _path(self, digest: str) -> str:
        return os.path.join(self._place, digest.replace(":", "-"))

    def _is_ours(self) -> bool:
        if not self._is_removed:
            return False
        found = os.lstat(self._place)
        return found.st_uid == os.geteuid() and found.st_mode & 0o170077 == 0o040000
