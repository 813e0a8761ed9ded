"""The user's code as a host keeps it from one attempt or run to the next: by content, and only the last used."""

from __future__ import annotations

import contextlib
import os
import secrets

from rankzero.values.digest import digest_of_file

KEPT = 4
"""Files that stay; each has 64 MiB at most."""


class KeptFiles:
    """A directory among Spark's local ones, which end with the executor. Elsewhere nothing is kept."""

    def __init__(self, scratch: str) -> None:
        local = os.path.dirname(scratch)
        self._is_removed = local in os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        self._place = os.path.join(local, f"rankzero-files-{os.geteuid()}")

    def take(self, digest: str, path: str) -> bool:
        """Puts a file with this digest at ``path``, if there is one; whoever removes it here does not harm that."""
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
        """Keeps a file, whose digest was compared; what was not used for longest goes."""
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
