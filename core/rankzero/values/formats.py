"""Writes a value to a file and reads it back: json, torch, pickle.

* ``json`` for values that JSON returns unchanged;
* ``torch`` for tensors in dicts, lists and tuples of such values: a file of `torch.save`, which any program loads by
  ``torch.load(file, weights_only=True, mmap=True)``. It runs no code, and tensors are mapped from the file;
* ``pickle`` for everything else, by cloudpickle, with large buffers beside the pickle.

A written file is loaded once: a value that cannot be read back fails while it still exists. A digest is ``sha256:`` and
what ``sha256sum`` prints of a file.

This module runs inside workers: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values import pickled
from rankzero.values.plain import is_json

if TYPE_CHECKING:
    import tarfile

JSON, TORCH, PICKLE = "json", "torch", "pickle"
DIRECTORY = "tar"  # Format of a directory tree, for checkpoints
SHARDS = "shards"  # Format of one rank's part of a sharded state, for checkpoints: see `rankzero.train.sharded`


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
    with open(path, "w+b") as file, ThreadPoolExecutor(1, "rankzero-sync") as pool:
        dump(value, file_format, file)
        # The disk and a processor work at the same time.
        synced = pool.submit(os.fsync, file.fileno())
        digest = digest_of_file(file.fileno())
        synced.result()
        return os.fstat(file.fileno()).st_size, digest


def dump(value: object, file_format: str, file: IO[bytes]) -> None:
    """Writes a value to an open file, and reads it back.

    Raises:
        ResultError: the value cannot be pickled, or the file cannot be read back; the message has the value's type.
    """
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


def read(path: str, file_format: str, digest: str | None) -> Any:
    """Loads a value from a local file after it has compared the digest; None skips the comparison.

    Raises:
        OSError: the file cannot be opened.
        ResultError: the digest differs, the format is unknown, or an object cannot be created here.
    """
    with open(path, "rb") as file:
        return read_open(file, path, file_format, digest)


def read_open(file: IO[bytes], location: str, file_format: str, digest: str | None) -> Any:
    """Loads a value from an open file, like `read`. The location is named in errors."""
    with pickled.loading(f"the result {location} cannot be loaded here"):
        # By the descriptor, so that the checked file is the one that is loaded, even if its name is replaced.
        if digest is not None:
            verify(file.fileno(), digest, location)
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
