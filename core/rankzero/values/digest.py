"""The digest of a file: ``sha256:`` and what ``sha256sum`` prints of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, Any

from rankzero.errors import ResultError

_READ = 1 << 20


def digest_of(parts: Iterable[bytes | bytearray | memoryview]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return f"sha256:{found.hexdigest()}"


def digest_of_file(path: str | int) -> str:
    """Returns the digest of a file, by its path or descriptor. Raises OSError if it does not exist."""
    with open(path if isinstance(path, str) else f"/dev/fd/{path}", "rb", buffering=0) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def verify(file: int, expected: str, location: str) -> None:
    """Raises ResultError if an open file has another digest than the expected one. The location is named in errors."""
    if (found := digest_of_file(file)) != expected:
        raise ResultError(
            f"{location} has the digest {found[:26]}..., but {expected[:26]}... was recorded: the file was changed or "
            "damaged after it was committed",
            is_damage=True,
        )


class HashedFile:
    """A file that is written to, which a thread hashes meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        """Prepares the digest of an open file that is empty."""
        self._file = file
        self._pool = ThreadPoolExecutor(1, "rankzero-digest")
        self._has_more = SimpleQueue[bool]()
        self._digest = self._pool.submit(self._follow)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._has_more.put(False)
        self._pool.shutdown()

    def write(self, data: Any) -> int:
        """Writes all of the bytes to the file's end."""
        self._file.write(data)
        self._has_more.put(True)
        return memoryview(data).nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def digest(self, meanwhile: Callable[[], object]) -> str:
        """Returns the digest of the whole file; another function is called meanwhile, and its error raised."""
        self.flush()
        self._has_more.put(False)
        meanwhile()
        return self._digest.result()

    def _follow(self) -> str:
        found, at, has_more = hashlib.sha256(), 0, True
        while has_more:
            has_more = self._has_more.get()
            # Read, not mapped: with a mapping, a file that shrinks meanwhile would kill the process.
            while at < os.fstat(self._file.fileno()).st_size and (piece := os.pread(self._file.fileno(), _READ, at)):
                found.update(piece)
                at += len(piece)
        return f"sha256:{found.hexdigest()}"
