"""Writes a value to a file and reads it back: json, torch, pickle.

* ``json`` for values that JSON returns unchanged;
* ``torch`` for tensors in dicts, lists and tuples of such values: a file of `torch.save`, which any program loads by
  ``torch.load(file, weights_only=True, mmap=True)``. It runs no code, and tensors are mapped from the file;
* ``pickle`` for everything else, by cloudpickle, with large buffers beside the pickle.

A written file is loaded once: a value that cannot be read back fails while it still exists. The digest of a file of up
to 4 MiB is ``sha256:`` and what ``sha256sum`` prints; of a larger one, whose blocks of 4 MiB all cores hash while it is
written, ``sha256-4m:`` and the sha256 of their sha256s.

This module runs inside workers: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.host.usage import available_cores
from rankzero.values import pickled
from rankzero.values.plain import is_json

if TYPE_CHECKING:
    import tarfile

JSON, TORCH, PICKLE = "json", "torch", "pickle"
BLOCK, _SYNCED = 4 << 20, 4  # Bytes that one thread hashes, and blocks after which the disk has them
DIRECTORY = "tar"  # Format of a directory tree, for checkpoints
SHARDS = "shards"  # Format of one rank's part of a sharded state, for checkpoints: see `rankzero.train.sharded`


def digest_of(parts: Iterable[bytes | bytearray | memoryview]) -> str:
    """Returns the digest of a file that consists of the concatenated parts."""
    blocks, size = [hashlib.sha256()], 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            if size == len(blocks) * BLOCK:
                blocks.append(hashlib.sha256())
            piece = rest[: len(blocks) * BLOCK - size]
            blocks[-1].update(piece)
            size, rest = size + len(piece), rest[len(piece) :]
    return _joined([block.digest() for block in blocks])


def digest_of_file(path: str | int) -> str:
    """Returns the digest of a file, by its path or descriptor. Raises OSError if it does not exist."""
    with open(path if isinstance(path, str) else f"/dev/fd/{path}", "rb", buffering=0) as file:
        return digest_of(iter(lambda: file.read(1 << 20), b""))


def _joined(blocks: list[bytes]) -> str:
    """Returns the digest of a file whose blocks have these sha256s."""
    if len(blocks) == 1:
        return f"sha256:{blocks[0].hex()}"
    return f"sha256-4m:{hashlib.sha256(b''.join(blocks)).hexdigest()}"


class _HashedFile(io.BufferedRandom):
    """A new file whose blocks the threads of a pool hash, each as soon as it is complete. The disk begins meanwhile."""

    def __init__(self, path: str, pool: ThreadPoolExecutor) -> None:
        super().__init__(io.FileIO(path, "w+"))
        self._pool, self.size = pool, 0
        self.blocks, self.synced = list[Future[bytes]](), list[Future[None]]()

    def write(self, data: Any) -> int:
        for begin in range(0, len(data), BLOCK):
            self.size += super().write(data[begin : begin + BLOCK])
            if self.size // BLOCK > len(self.blocks):
                self.hash_next()
        return len(data)

    def hash_next(self) -> None:
        self.flush()
        # From the file, since the memory may be freed by now; read, since a mapping of a file that shrinks is fatal.
        read = functools.partial(os.pread, self.fileno(), BLOCK, len(self.blocks) * BLOCK)
        self.blocks.append(self._pool.submit(lambda: hashlib.sha256(read()).digest()))
        if len(self.blocks) % _SYNCED == 0:
            self.synced.append(self._pool.submit(os.fsync, self.fileno()))


def verify(file: int, expected: str, location: str) -> None:
    """Raises ResultError if an open file has another digest than the expected one. The location is named in errors."""
    if (found := digest_of_file(file)) != expected:
        raise ResultError(
            f"{location} has the digest {found[:26]}..., but {expected[:26]}... was recorded: the file was changed or "
            "damaged after it was committed",
            is_damage=True,
        )


def choose(value: object) -> str:
    """Chooses the format in which a value is stored."""
    if is_json(value):
        return JSON
    # Some kinds of tensors lack attributes of others and raise any exception.
    with contextlib.suppress(Exception):
        if pickled.is_all_tensors(value):
            return TORCH
    return PICKLE


def write(value: object, file_format: str, path: str) -> tuple[int, str]:
    """Writes a value to a local file, and returns the file's size in bytes and its digest. Raises like `dump`."""
    # One thread waits for the disk.
    with ThreadPoolExecutor(available_cores() + 1, "rankzero-digest") as pool, _HashedFile(path, pool) as file:
        dump(value, file_format, file)
        if file.size % BLOCK:
            file.hash_next()
        os.fsync(file.fileno())
        for synced in file.synced:
            synced.result()
        return file.size, _joined([block.result() for block in file.blocks])


def dump(value: object, file_format: str, file: IO[bytes]) -> None:
    """Writes a value to an open file, and reads it back. Raises ResultError, which has its type, if that fails."""
    if file_format == JSON:
        file.write(json.dumps(value).encode())
    elif file_format == TORCH:
        import torch

        # The digest replaces torch's checksums, which take half as long as writing. Before 2.6 there are no options.
        has_crc = getattr(torch.serialization, "get_crc32_options", bool)()
        switch = getattr(torch.serialization, "set_crc32_options", bool)
        switch(False)
        try:
            torch.save(value, file, pickle_module=pickled.TorchPickle, pickle_protocol=2)
        except RuntimeError as error:
            # torch's own error about a file that it could not finish hides that of the file.
            raise error.__context__ or error from None
        finally:
            switch(has_crc)
    else:
        parts = pickled.pickled(value)
        while parts:
            file.write(parts.pop(0))
    file.flush()
    with pickled.loading(f"a value of type {pickled.type_name(value)} was written, but cannot be read back"):
        _read(file.fileno(), file_format)


def write_directory(directory: str, file: IO[bytes]) -> None:
    """Writes the files and folders of a directory to an open file, as an uncompressed tar archive."""
    import tarfile

    # Links are followed: their targets may not exist where the checkpoint is opened.
    with tarfile.open(fileobj=file, mode="w|", dereference=True, bufsize=1 << 20) as archive:
        archive.gettarinfo = functools.partial(_entry, archive.gettarinfo)  # type: ignore[method-assign]
        archive.add(directory, arcname=".")
    file.flush()


def _entry(read: Any, name: str, *more: Any) -> Any:
    """Returns the tar entry of a file or folder; None leaves out sockets, dead links and links to a folder around."""
    around = os.path.join(os.path.realpath(os.path.dirname(name)), "")
    is_loop = os.path.islink(name) and around.startswith(os.path.join(os.path.realpath(name), ""))
    return None if is_loop or not (os.path.isfile(name) or os.path.isdir(name)) else read(name, *more)


def unpack(archive: tarfile.TarFile, target: str | os.PathLike[str]) -> None:
    """Unpacks an archive that rankzero made, and whose checksum was verified, into a directory."""
    import tarfile

    # Python 3.11.0 to 3.11.3, which Debian 12 has, has no filters.
    filtered: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(target, **filtered)


def read_directory(path: str, digest: str, target: str) -> None:
    """Unpacks a file of `write_directory` into ``target``. Raises ResultError if the digest differs."""
    import tarfile

    with open(path, "rb") as file:
        verify(file.fileno(), digest, path)
        with pickled.loading(f"{path} cannot be unpacked"), tarfile.open(fileobj=file) as archive:
            unpack(archive, target)


def read(path: str, file_format: str, digest: str | None, location: str = "") -> Any:
    """Loads a value from a local file, whose digest is compared unless it is None. Errors name the location, if given.

    Raises OSError if the file cannot be opened, else ResultError.
    """
    with open(path, "rb") as file, pickled.loading(f"the result {location or path} cannot be loaded here"):
        # By the descriptor, so that the checked file is the one that is loaded, even if its name is replaced.
        if digest is not None:
            verify(file.fileno(), digest, location or path)
        return _read(file.fileno(), file_format)


def _read(file: int, file_format: str) -> Any:
    if file_format == JSON:
        with open(f"/dev/fd/{file}", "rb") as text:
            return json.load(text)
    if file_format == TORCH:
        import torch

        # torch maps a file by its name; a mapping is private, so that the file is never changed.
        return torch.load(f"/dev/fd/{file}", map_location="cpu", weights_only=True, mmap=True)
    if file_format == PICKLE:
        return pickled.open_packed(file, pickled.Loader)
    raise ValueError(f"the format {file_format!r} is not known here")
