"""The digest of a file, with the name of its algorithm.

sha256:HEX      a file of up to 8 MiB: what ``sha256sum`` prints
sha256-8m:HEX   a larger file: the sha256 of the sha256s of its blocks of 8 MiB, which all cores hash together
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from rankzero.errors import ResultError
from rankzero.host.usage import available_cores

BLOCK = 8 << 20
"""Bytes of a block, which one core hashes."""

PLAIN, BLOCKS = "sha256", "sha256-8m"

_READ = 1 << 20


class Writable(Protocol):
    """A file or another object that bytes can be written to."""

    def write(self, data: Any, /) -> object:
        """Writes all of the given bytes."""


def digest_of(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    blocks, size = [hashlib.sha256()], 0
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            if size and not size % BLOCK:
                blocks.append(hashlib.sha256())
            piece = view[: BLOCK - size % BLOCK]
            blocks[-1].update(piece)
            size, view = size + len(piece), view[len(piece) :]
    return _text([block.digest() for block in blocks])


def digest_of_file(path: str) -> str:
    """Returns the digest of a file. Raises OSError if it does not exist."""
    with open(path, "rb") as file:
        return FileDigest(file).text()


class FileDigest:
    """The digest of an open local file, whose blocks all cores hash, each as soon as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        """Prepares the digest of a file that is complete, or is only written to by `write`."""
        self._file = file
        self._pool: Any = None
        self._blocks: list[Any] = []

    def write(self, data: Any) -> int:
        """Writes all of the bytes to the file's end."""
        self._file.write(data)
        self._hash(self._size() // BLOCK)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Writes what is still in the file's buffer."""
        self._file.flush()

    def text(self, meanwhile: Callable[[], object] = lambda: None) -> str:
        """Returns the digest of the whole file; another function is called meanwhile, and its error raised."""
        self.flush()
        if self._size() <= BLOCK:
            meanwhile()
            return _text([_block(self._file.fileno(), 0)])
        self._hash(-(-self._size() // BLOCK))
        with self._pool:
            meanwhile()
        return _text([block.result() for block in self._blocks])

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _hash(self, count: int) -> None:
        if len(self._blocks) < count:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = self._pool or ThreadPoolExecutor(available_cores(), "rankzero-digest")
            numbers = range(len(self._blocks), count)
            self._blocks += [self._pool.submit(_block, self._file.fileno(), number * BLOCK) for number in numbers]


def _block(file: int, begin: int) -> bytes:
    digest = hashlib.sha256()
    # Read, not mapped: with a mapping, a file that shrinks meanwhile would kill the process.
    for at in range(begin, begin + BLOCK, _READ):
        digest.update(os.pread(file, _READ, at))
    return digest.digest()


def _text(blocks: Sequence[bytes]) -> str:
    if len(blocks) == 1:
        return f"{PLAIN}:{blocks[0].hex()}"
    return f"{BLOCKS}:{hashlib.sha256(b''.join(blocks)).hexdigest()}"


def split(digest: str) -> tuple[str, str]:
    """Splits a digest into algorithm and digits. Raises ResultError if a later version of rankzero wrote it."""
    name, _, digits = digest.rpartition(":")
    if name not in (PLAIN, BLOCKS):
        raise ResultError(f"the digest {digest[:32]} is of an algorithm that is not known here: upgrade rankzero")
    return name, digits


def verify(file: IO[bytes], expected: str, location: str = "") -> None:
    """Compares the digest of a local file with the expected one. The location is named in errors.

    Raises:
        ResultError: the digests differ, or this version does not have the algorithm.
    """
    split(expected)
    if (found := FileDigest(file).text()) != expected:
        raise ResultError(
            f"{location or file.name} has the digest {found[:26]}..., but {expected[:26]}... was recorded: the file "
            "was changed or damaged after it was committed",
            is_damage=True,
        )
