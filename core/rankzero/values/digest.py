"""The digest of a file: ``sha256:`` and its sha256, hex, as ``sha256sum`` prints it.

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import IO, Any, Protocol

from rankzero.errors import ResultError

Bytes = bytes | bytearray | memoryview

NAME = "sha256:"
"""Name of the algorithm, before the digits."""

_LARGE = 256 << 10
"""Bytes from which on a piece is hashed by a thread while it is written; starting one takes as long as hashing less."""


class Writable(Protocol):
    """A file or another object that bytes can be written to."""

    def write(self, data: Any, /) -> object:
        """Writes all of the given bytes."""


def digest_of(parts: Sequence[Bytes]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return NAME + found.hexdigest()


def digest_of_file(path: str) -> str:
    """Returns the digest of a file. Raises OSError if it does not exist."""
    with open(path, "rb") as file:
        return NAME + hashlib.file_digest(file, "sha256").hexdigest()


def split(digest: str) -> tuple[str, str]:
    """Splits a digest into algorithm and digits. Raises ResultError if a later version of rankzero wrote it."""
    name, colon, digits = digest.rpartition(":")
    if name + colon != NAME:
        raise ResultError(f"the digest {digest[:32]} is of an algorithm that is not known here: upgrade rankzero")
    return name, digits


def verify(file: IO[bytes], expected: str, location: str = "") -> None:
    """Compares the digest of a local file, open at its begin, with the expected one.

    Args:
        file: The file.
        expected: The expected digest.
        location: The name of the file in errors, if that is a copy without a name.

    Raises:
        ResultError: the digests differ, or this version does not have the algorithm.
    """
    (_, recorded), found = split(expected), hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    if found != recorded:
        raise ResultError(
            f"{location or file.name} has the digest sha256:{found[:16]}..., but sha256:{recorded[:16]}... was "
            "recorded: the file was changed or damaged after it was committed",
            is_damage=True,
        )
    file.seek(0)


class HashingFile:
    """A file that writes to another one, counts the bytes, and hashes them in a thread meanwhile."""

    def __init__(self, file: Writable) -> None:
        """Prepares to write to a file, which stays open."""
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        self.failure: BaseException | None = None
        """The error of the other file, which torch replaces by one of its own."""

    def write(self, data: Any) -> int:
        """Writes all of the bytes; the caller may reuse their memory afterwards."""
        view = memoryview(data).cast("B")
        thread = self._hashing(view)
        try:
            self._file.write(view)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if thread:
                thread.join()
        if not thread:
            self._hash.update(view)
        self.size += len(view)
        return len(view)

    def _hashing(self, view: memoryview) -> threading.Thread | None:
        """Starts a thread that hashes the bytes; returns None if there is none."""
        if len(view) < _LARGE:
            return None
        thread = threading.Thread(target=self._hash.update, args=(view,), name="rankzero-digest", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread starts while the interpreter shuts down, or at the system's limit of threads.
            return None
        return thread

    def flush(self) -> None:
        """Does nothing, since the other file has all bytes."""

    @property
    def digest(self) -> str:
        """Returns the digest of everything that was written."""
        return NAME + self._hash.hexdigest()
