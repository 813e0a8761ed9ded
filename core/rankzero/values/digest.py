"""Checksums with the name of their algorithm, computed by all available cores.

    sha256:HEX      a file of up to one block: the same as ``sha256sum``
    sha256-8m:HEX   a larger file: the sha256 of the sha256 of each block of 8 MiB
    crc32-8m:HEX    a larger file that runs no code: the sha256 of the crc32 of each block, four bytes, big-endian

Digits without a name are a plain sha256 of a file of any size. A crc32 takes half the time of a sha256. It finds
damage, except 1 of 4 billion changes of a block, but no intended change. So it is not used for files that run code.

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any, Protocol

from rankzero.errors import ResultError
from rankzero.host.usage import available_cores

BLOCK = 8 << 20
"""Bytes of a block, whose checksum one core computes."""

PLAIN, BLOCKS, SUMS = "sha256", "sha256-8m", "crc32-8m"

_WAITING = 16
"""Most blocks in the queue: copies of a GPU's tensors stay in memory until their blocks are hashed."""

_READ = 1 << 20

Bytes = bytes | bytearray | memoryview


def digest_of(parts: Sequence[Bytes]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    views = [memoryview(part).cast("B") for part in parts]
    if sum(map(len, views)) <= BLOCK:
        # Without threads: there may be many small tensors, with one call for each.
        return _plain([(view, None) for view in views])
    digest = Digest()
    try:
        for view in views:
            digest.update_lasting(view)
        return digest.text()
    finally:
        digest.close()


def digest_of_file(path: str, like: str = BLOCKS + ":") -> str:
    """Computes the digest of a file.

    Args:
        path: The file.
        like: A digest with the algorithm to use.

    Raises:
        OSError: the file does not exist.
        ResultError: this version does not have the algorithm.
    """
    with open(path, "rb") as file:
        return _of_file(file, split(like)[0])


def plain_sha256(file: IO[bytes]) -> str:
    """Returns the plain sha256, as ``sha256sum`` prints it, of the unread rest of an open file."""
    found = hashlib.sha256()
    while chunk := file.read(_READ):
        found.update(chunk)
    return found.hexdigest()


def verify(file: IO[bytes], expected: str, location: str = "") -> None:
    """Compares the digest of a local file, open at its begin, with the expected one.

    Args:
        file: The file.
        expected: The expected digest.
        location: The name of the file in errors, if that is a copy without a name.

    Raises:
        ResultError: the digests differ, or this version does not have the algorithm.
    """
    name, digits = split(expected)
    actual = _of_file(file, name)
    if actual != f"{name}:{digits}":
        raise ResultError(
            f"{location or file.name} has the digest {_shown(actual)}, but {_shown(f'{name}:{digits}')} was recorded: "
            "the file was changed or damaged after it was committed",
            is_damage=True,
        )
    file.seek(0)


def split(digest: str) -> tuple[str, str]:
    """Splits a digest into algorithm and digits. Raises ResultError for an unknown algorithm."""
    name, found, digits = digest.rpartition(":")
    if name not in ("", PLAIN, BLOCKS, SUMS) or (found and not name):
        raise ResultError(f"the digest {_shown(digest)} is of an algorithm that is not known here: upgrade rankzero")
    return name or PLAIN, digits


def _shown(digest: str) -> str:
    name, _, digits = digest.rpartition(":")
    return f"{name}:{digits[:16]}..."


class Digest:
    """A digest of data that is added piece by piece. It may have threads, which `close` ends."""

    def __init__(self, algorithm: str = BLOCKS, *, threads: bool = True) -> None:
        """Starts an empty digest.

        Args:
            algorithm: Algorithm for more than one block: `BLOCKS` or `SUMS`.
            threads: False computes everything in the calling threads.
        """
        self._algorithm = algorithm
        self._pool = _Pool(available_cores() if threads else 0)
        self._block: list[tuple[Bytes, object]] = []
        self._room = BLOCK
        self.size = 0

    def update(self, data: Any) -> None:
        """Adds bytes; copies them, so that the caller may reuse the memory."""
        self.update_lasting(bytes(memoryview(data).cast("B")))

    def update_lasting(self, data: Any, owner: object = None) -> None:
        """Adds bytes without a copy; they must not change until `text` is called.

        Args:
            data: Bytes, or an object with a buffer of bytes.
            owner: Object that is kept alive as long as the bytes are needed.
        """
        view = memoryview(data).cast("B")
        self.size += len(view)
        while view:
            if not self._room:
                # Only now it is certain that there is more than one block.
                self._begin_block()
            piece, view = view[: self._room], view[self._room :]
            self._block.append((piece, owner))
            self._room -= len(piece)

    def text(self) -> str:
        """Returns the digest of all added bytes; reraises an error of a hashing thread."""
        if self.size <= BLOCK:
            return _plain(self._block)
        if self._block:
            self._begin_block()
        return _text(self._algorithm, self._pool.results())

    def _begin_block(self) -> None:
        self._pool.do(partial(_hash, _OF_BLOCK[self._algorithm], self._block))
        self._block, self._room = [], BLOCK

    def close(self) -> None:
        """Ends the threads of the digest and frees the memory that they use."""
        self._pool.close()


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc32:
    """A crc32 with the interface of `hashlib`."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


_OF_BLOCK: dict[str, Callable[[], _Hash]] = {BLOCKS: hashlib.sha256, SUMS: _Crc32}


def _plain(block: list[tuple[Bytes, object]]) -> str:
    return f"{PLAIN}:{_hash(hashlib.sha256, block).hex()}"


def _text(algorithm: str, blocks: Sequence[bytes]) -> str:
    return f"{algorithm}:{hashlib.sha256(b''.join(blocks)).hexdigest()}"


def _of_file(file: IO[bytes], algorithm: str) -> str:
    """Returns the digest of a file that is open at its begin."""
    size = os.fstat(file.fileno()).st_size
    if algorithm == PLAIN or size <= BLOCK:
        return f"{PLAIN}:{plain_sha256(file)}"
    pool = _Pool(min(available_cores(), size // BLOCK))
    try:
        for offset in range(0, size, BLOCK):
            pool.do(partial(_hash_at, _OF_BLOCK[algorithm], file.fileno(), offset))
        return _text(algorithm, pool.results())
    finally:
        pool.close()


def _hash(algorithm: Callable[[], _Hash], block: list[tuple[Bytes, object]]) -> bytes:
    found = algorithm()
    for piece, _ in block:
        # Large updates release the GIL.
        found.update(piece)
    return found.digest()


def _hash_at(algorithm: Callable[[], _Hash], descriptor: int, offset: int) -> bytes:
    # Read, not mapped: with a mapping, a file that shrinks meanwhile would kill the process.
    found = algorithm()
    end = offset + BLOCK
    while offset < end and (chunk := os.pread(descriptor, min(_READ, end - offset), offset)):
        found.update(chunk)
        offset += len(chunk)
    return found.digest()


class _Pool:
    """A pool of threads that call functions, with the results in the order of the calls.

    Not a pool of `concurrent.futures`: exit handlers, which may save checkpoints, cannot start one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: queue.Queue[tuple[int, Callable[[], bytes]] | None] = queue.Queue(_WAITING)
        self._threads: list[threading.Thread] = []
        self._results: dict[int, bytes] = {}
        self._count = 0
        self._failure: BaseException | None = None

    def do(self, function: Callable[[], bytes]) -> None:
        """Queues a function for the threads; calls it directly if there are none."""
        number, self._count = self._count, self._count + 1
        if not self._start():
            self._call(number, function)
        else:
            self._waiting.put((number, function))

    def results(self) -> list[bytes]:
        """Waits for all functions and returns their results; reraises an error of one."""
        self._waiting.join()
        if self._failure:
            raise self._failure
        return [self._results[number] for number in range(self._count)]

    def close(self) -> None:
        """Ends the threads of the pool."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start(self) -> bool:
        """Starts one more thread, until every core has one; returns True if there are threads."""
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._work, name="rankzero-digest", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                # No thread starts while the interpreter shuts down, or at the system's limit of threads.
                self._size = len(self._threads)
        return bool(self._threads)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._call(*item)
            del item
            self._waiting.task_done()

    def _call(self, number: int, function: Callable[[], bytes]) -> None:
        try:
            self._results[number] = function()
        except BaseException as error:
            self._failure = error
