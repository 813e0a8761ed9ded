"""Checksums that name their algorithm, computed by as many cores as there are.

    sha256:HEX      of a file of one block or less: what ``sha256sum`` gives
    sha256-8m:HEX   of a larger one: the sha256 of the sha256 of each of its blocks of 8 MiB
    crc32-8m:HEX    of a larger one that runs no code: the sha256 of the crc32 of each, four bytes, the highest first

Digits without a name are a plain sha256, whatever the size. A crc32 is half the work of a sha256. It finds damage, all
but 1 of 4 billion changes of a block; it does not find what somebody changes on purpose, so what runs code has none.

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
from rankzero.host.cores import available_cores

BLOCK = 8 << 20
"""Bytes of a block, of which one core computes the checksum."""

PLAIN, BLOCKS, SUMS = "sha256", "sha256-8m", "crc32-8m"

_WAITING = 16
"""Blocks by which hashing may be behind: tensors of a GPU have copies for so long."""

_READ = 1 << 20

Bytes = bytes | bytearray | memoryview


def digest_of(parts: Sequence[Bytes]) -> str:
    """The digest of a file that consists of the parts, one after the other."""
    views = [memoryview(part).cast("B") for part in parts]
    if sum(map(len, views)) <= BLOCK:
        # Of many small tensors each has one.
        return _plain([(view, None) for view in views])
    digest = Digest()
    try:
        for view in views:
            digest.update_lasting(view)
        return digest.text()
    finally:
        digest.close()


def digest_of_file(path: str, like: str = BLOCKS + ":") -> str:
    """The digest of a file.

    Args:
        path: The file.
        like: A digest, of whose algorithm it shall be.

    Raises:
        OSError: there is no such file.
        ResultError: that algorithm is not known here.
    """
    with open(path, "rb") as file:
        return _of_file(file, split(like)[0])


def plain_sha256(file: IO[bytes]) -> str:
    """What ``sha256sum`` gives of an open file, as far as it was not read yet."""
    found = hashlib.sha256()
    while chunk := file.read(_READ):
        found.update(chunk)
    return found.hexdigest()


def verify(file: IO[bytes], expected: str) -> None:
    """Compares a local file, open at its begin, with its digest.

    Raises:
        ResultError: it is another one, or names an algorithm that is not known here.
    """
    name, digits = split(expected)
    actual = _of_file(file, name)
    if actual != f"{name}:{digits}":
        raise ResultError(
            f"{file.name} has the digest {_shown(actual)}, but {_shown(f'{name}:{digits}')} was recorded: "
            "the file was changed or damaged after it was committed"
        )
    file.seek(0)


def split(digest: str) -> tuple[str, str]:
    """Name of the algorithm and digits. Raises ResultError for an algorithm that is not known here."""
    name, found, digits = digest.rpartition(":")
    if name not in ("", PLAIN, BLOCKS, SUMS) or (found and not name):
        raise ResultError(f"the digest {_shown(digest)} is of an algorithm that is not known here: upgrade rankzero")
    return name or PLAIN, digits


def _shown(digest: str) -> str:
    name, _, digits = digest.rpartition(":")
    return f"{name}:{digits[:16]}..."


class Digest:
    """The digest of what comes piece by piece. `close` it, for it may have threads."""

    def __init__(self, algorithm: str = BLOCKS, *, threads: bool = True) -> None:
        """Begins with no bytes.

        Args:
            algorithm: That of more than one block: `BLOCKS` or `SUMS`.
            threads: False computes everything in the threads that call.
        """
        self._algorithm = algorithm
        self._pool = _Pool(available_cores() if threads else 0)
        self._block: list[tuple[Bytes, object]] = []
        self._room = BLOCK
        self.size = 0

    def update(self, data: Any) -> None:
        """Takes bytes whose memory may be used for something else afterwards."""
        self.update_lasting(bytes(memoryview(data).cast("B")))

    def update_lasting(self, data: Any, owner: object = None) -> None:
        """Takes bytes that do not change before `text` is asked for.

        Args:
            data: Bytes, or anything that has the buffer of some.
            owner: What is to live as long as it is needed.
        """
        view = memoryview(data).cast("B")
        self.size += len(view)
        while view:
            if not self._room:
                # Only now it is known to have more than one block.
                self._begin_block()
            piece, view = view[: self._room], view[self._room :]
            self._block.append((piece, owner))
            self._room -= len(piece)

    def text(self) -> str:
        """The digest of all that came; raises what computing it raised."""
        if self.size <= BLOCK:
            return _plain(self._block)
        if self._block:
            self._begin_block()
        return _text(self._algorithm, self._pool.results())

    def _begin_block(self) -> None:
        self._pool.do(partial(_hash, _OF_BLOCK[self._algorithm], self._block))
        self._block, self._room = [], BLOCK

    def close(self) -> None:
        """Ends its threads, with the memory that they hold."""
        self._pool.close()


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc32:
    """As `hashlib` has its hashes."""

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
    """The digest of a file that is open at its begin."""
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
        # Large updates leave the interpreter's lock.
        found.update(piece)
    return found.digest()


def _hash_at(algorithm: Callable[[], _Hash], descriptor: int, offset: int) -> bytes:
    # Read, not mapped: a file that shrinks meanwhile would end the process.
    found = algorithm()
    end = offset + BLOCK
    while offset < end and (chunk := os.pread(descriptor, min(_READ, end - offset), offset)):
        found.update(chunk)
        offset += len(chunk)
    return found.digest()


class _Pool:
    """Results in their order, of functions that threads call.

    Not one of `concurrent.futures`: exit handlers, which may save something, get none there.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: queue.Queue[tuple[int, Callable[[], bytes]] | None] = queue.Queue(_WAITING)
        self._threads: list[threading.Thread] = []
        self._results: dict[int, bytes] = {}
        self._count = 0
        self._failure: BaseException | None = None

    def do(self, function: Callable[[], bytes]) -> None:
        """Calls a function, in a thread if there are some, as soon as one is free."""
        number, self._count = self._count, self._count + 1
        if not self._start():
            self._call(number, function)
        else:
            self._waiting.put((number, function))

    def results(self) -> list[bytes]:
        """What the functions returned; raises what one raised."""
        self._waiting.join()
        if self._failure:
            raise self._failure
        return [self._results[number] for number in range(self._count)]

    def close(self) -> None:
        """Ends the threads."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start(self) -> bool:
        """One more thread for each call, until every core has one."""
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._work, name="rankzero-digest", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                # None starts while the interpreter ends, or the system has none left.
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
