"""The digest of a file, with the name of its algorithm.

    sha256:HEX      a file of up to 8 MiB: what ``sha256sum`` prints
    sha256-8m:HEX   a larger file: the sha256 of the sha256s of its blocks of 8 MiB, which all cores hash together

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any, Protocol

from rankzero.errors import ResultError
from rankzero.host.usage import available_cores

BLOCK = 8 << 20
"""Bytes of a block, which one core hashes."""

PLAIN, BLOCKS = "sha256", "sha256-8m"

_READ = 1 << 20

Bytes = bytes | bytearray | memoryview


class Writable(Protocol):
    """A file or another object that bytes can be written to."""

    def write(self, data: Any, /) -> object:
        """Writes all of the given bytes."""


class Digest:
    """The digest of bytes that are added piece by piece."""

    def __init__(self) -> None:
        """Creates the digest of no bytes."""
        self._blocks = [hashlib.sha256()]
        self.size = 0

    def update(self, data: Any) -> None:
        """Adds bytes to the end."""
        view = memoryview(data).cast("B")
        while view:
            if self.size and not self.size % BLOCK:
                self._blocks.append(hashlib.sha256())
            piece = view[: BLOCK - self.size % BLOCK]
            self._blocks[-1].update(piece)
            self.size, view = self.size + len(piece), view[len(piece) :]

    def text(self) -> str:
        """Returns the digest of everything that was added."""
        return _text(self._blocks)


class HashingFile(Digest):
    """A file that writes to another one, and hashes the bytes."""

    def __init__(self, file: Writable) -> None:
        """Prepares to write to a file, which stays open."""
        super().__init__()
        self._file = file

    def write(self, data: Any) -> int:
        """Writes all of the bytes; the caller may reuse their memory afterwards."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.update(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing, since the other file has all bytes."""


def digest_of(parts: Sequence[Bytes]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    digest = Digest()
    for part in parts:
        digest.update(part)
    return digest.text()


def digest_of_file(path: str) -> str:
    """Returns the digest of a file. Raises OSError if it does not exist."""
    with open(path, "rb") as file:
        return digest_of_open(file)


def digest_of_open(file: IO[bytes]) -> str:
    """Returns the digest of an open file."""
    with FileDigest(file) as digest:
        return digest.text()


class FileDigest:
    """The digest of a local file, whose blocks all cores hash, each as soon as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        """Prepares the digest of an open file, which is complete, or is only written to by `write`."""
        self._file = file
        self._blocks: list[Any] = []
        self._todo: list[Callable[[], object]] = []
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def __enter__(self) -> FileDigest:
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.clear()
        for thread in self._threads:
            thread.join()

    def write(self, data: Any) -> int:
        """Writes all of the bytes to the file's end."""
        self._file.write(data)
        self._add(self._size() // BLOCK)
        # This thread continues to write.
        self._start(min(len(self._todo), available_cores() - 1))
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Writes what is still in the file's buffer."""
        self._file.flush()

    def text(self, *meanwhile: Callable[[], object]) -> str:
        """Returns the digest of the whole file; other functions are called meanwhile, and their errors raised."""
        self.flush()
        self._add(-(-self._size() // BLOCK) or 1)
        self._todo += meanwhile
        self._start(min(len(self._todo) - 1, available_cores()))
        self._work()
        for thread in self._threads:
            thread.join()
        for failure in self._failures:
            raise failure
        return _text(self._blocks)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _add(self, count: int) -> None:
        for number in range(len(self._blocks), count):
            self._blocks.append(hashlib.sha256())
            self._todo.insert(0, partial(self._read, number))

    def _start(self, most: int) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        # No thread starts while the interpreter shuts down, or at the system's limit of threads.
        with contextlib.suppress(RuntimeError):
            for _ in range(most - len(self._threads)):
                thread = threading.Thread(target=self._work, name="rankzero-digest", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self) -> None:
        try:
            while self._todo:
                self._todo.pop()()
        except IndexError:
            # Another thread took the last one.
            pass
        except BaseException as error:
            self._failures.append(error)

    def _read(self, number: int) -> None:
        # Read, not mapped: with a mapping, a file that shrinks meanwhile would kill the process.
        for at in range(number * BLOCK, (number + 1) * BLOCK, _READ):
            self._blocks[number].update(os.pread(self._file.fileno(), _READ, at))


def _text(blocks: Sequence[Any]) -> str:
    if len(blocks) == 1:
        return f"{PLAIN}:{blocks[0].hexdigest()}"
    return f"{BLOCKS}:{hashlib.sha256(b''.join(block.digest() for block in blocks)).hexdigest()}"


def split(digest: str) -> tuple[str, str]:
    """Splits a digest into algorithm and digits. Raises ResultError if a later version of rankzero wrote it."""
    name, _, digits = digest.rpartition(":")
    if name not in (PLAIN, BLOCKS):
        raise ResultError(f"the digest {digest[:32]} is of an algorithm that is not known here: upgrade rankzero")
    return name, digits


def verify(file: IO[bytes], expected: str, location: str = "") -> None:
    """Compares the digest of a local file with the expected one.

    Args:
        file: The open file.
        expected: The expected digest.
        location: The name of the file in errors, if that is a copy without a name.

    Raises:
        ResultError: the digests differ, or this version does not have the algorithm.
    """
    split(expected)
    if (found := digest_of_open(file)) != expected:
        raise ResultError(
            f"{location or file.name} has the digest {found[:26]}..., but {expected[:26]}... was recorded: the file "
            "was changed or damaged after it was committed",
            is_damage=True,
        )
