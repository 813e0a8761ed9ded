"""Writes a value to a file and reads it back: json, torch, pickle.

* ``json`` for values that JSON returns unchanged;
* ``torch`` for tensors in dicts, lists and tuples of such values: a file of `torch.save`, which any program loads by
  ``torch.load(file, weights_only=True, mmap=True)``. It runs no code, and tensors are mapped from the file;
* ``pickle`` for everything else, by cloudpickle, with large buffers beside the pickle.

A written file is loaded once: a value that cannot be read back fails while it still exists.

This module runs inside workers: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values import digest as digests
from rankzero.values import pickled, tensors
from rankzero.values.digest import Writable
from rankzero.values.plain import is_json

if TYPE_CHECKING:
    import tarfile

JSON, TORCH, PICKLE = "json", "torch", "pickle"
DIRECTORY = "tar"
"""Format of a directory tree, for checkpoints."""
DISTRIBUTED = "dcp.tar"
"""Format of one rank's directory from ``torch.distributed.checkpoint``, which is loaded with those of all ranks."""
SHARDS = "shards"
"""Format of one rank's pieces of a sharded state, for checkpoints: see `rankzero.values.sharded`."""


def choose(value: object) -> str:
    """Chooses the format in which a value is stored."""
    if is_json(value):
        return JSON
    # Some kinds of tensors lack attributes of others and raise any exception.
    with contextlib.suppress(Exception):
        if tensors.is_all_tensors(value):
            return TORCH
    return PICKLE


def write(value: object, file_format: str, path: str) -> tuple[int, str]:
    """Writes a value to a local file, and returns the file's size in bytes and its digest.

    Raises:
        ResultError: the value cannot be pickled, or the file cannot be read back; the message has the value's type.
    """
    with open(path, "w+b") as file:
        hashed = digests.FileDigest(file)
        _dump(value, file_format, hashed)
        file.flush()
        if file_format != JSON:
            with pickled.reading_back(value):
                _read(file, file_format)
        return _complete(hashed, file)


def _complete(hashed: digests.FileDigest, file: IO[bytes]) -> tuple[int, str]:
    """Returns a file's size in bytes and its digest. The disk writes while the cores hash."""
    digest = hashed.text(functools.partial(os.fsync, file.fileno()))
    return os.fstat(file.fileno()).st_size, digest


def write_to(value: object, file_format: str, file: io.BytesIO) -> tuple[int, str]:
    """Writes a value to an empty file in memory like `write`."""
    _dump(value, file_format, file)
    with pickled.reading_back(value):
        if file_format == TORCH:
            # Without the memory of the tensors.
            file.seek(0)
            sys.modules["torch"].load(file, map_location="meta", weights_only=True)
        elif file_format == PICKLE:
            pickled.unpack(file.getbuffer(), pickled.Loader)
    return file.seek(0, os.SEEK_END), digests.digest_of([file.getbuffer()])


def _dump(value: object, file_format: str, file: Writable) -> None:
    if file_format == JSON:
        file.write(json.dumps(value).encode())
    elif file_format == TORCH:
        import torch

        try:
            torch.save(value, file, pickle_module=tensors.TorchPickle, pickle_protocol=2)  # type: ignore[arg-type]
        except RuntimeError as error:
            # torch's own error about a file that it could not finish hides that of the file.
            raise error.__context__ or error from None
    else:
        for part in pickled.pickled(value):
            file.write(part)


def write_directory(directory: str, path: str) -> tuple[int, str]:
    """Writes a directory tree as one uncompressed tar file; returns like `write`."""
    import tarfile

    with open(path, "w+b") as file:
        hashed = digests.FileDigest(file)
        # Links are followed: their targets may not exist where the checkpoint is opened.
        writing: Any = {"fileobj": hashed, "mode": "w|", "dereference": True, "bufsize": 1 << 20}
        with tarfile.open(**writing) as archive:
            archive.gettarinfo = functools.partial(_entry, archive.gettarinfo)  # type: ignore[method-assign]
            archive.add(directory, arcname=".")
        return _complete(hashed, file)


def _entry(read: Callable[..., Any], name: str, *more: Any) -> Any:
    """Returns the tar entry of a file or folder; None leaves out others, and links to a folder around the link."""
    inside = os.path.join(os.path.realpath(os.path.dirname(name)), "")
    is_loop = os.path.islink(name) and inside.startswith(os.path.join(os.path.realpath(name), ""))
    if not is_loop and (os.path.isfile(name) or os.path.isdir(name)):
        return read(name, *more)
    print(f"rankzero: the checkpoint leaves out {name}, which is no file, or a link that cannot be followed")
    return None


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
        digests.verify(file, digest)
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
            digests.verify(file, digest, location)
        return _read(file, file_format)


def _read(file: IO[bytes], file_format: str) -> Any:
    if file_format == JSON:
        return json.load(file)
    if file_format == TORCH:
        import torch

        # torch maps a file by its name; a mapping is private, so that the file is never changed.
        return torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)
    if file_format == PICKLE:
        return pickled.open_packed(file.fileno(), pickled.Loader)
    raise ResultError(f"{file.name} has the format {file_format!r}, which is not known here: upgrade rankzero")


def is_distributed(directory: str) -> bool:
    """Returns True for a directory that ``torch.distributed.checkpoint`` wrote."""
    return any(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(directory))


def summarize(value: object) -> dict[str, Any]:
    """Returns the type of a value and, for a module or a dict of tensors, counts by data type. Never fails.

    Example:
        >>> summarize([1, 2])
        {'type': 'list'}
    """
    summary: dict[str, Any] = {"type": pickled.type_name(value)}
    # Objects of the user may raise anything, and that must not fail a training that has finished.
    with contextlib.suppress(Exception):
        torch: Any = sys.modules["torch"]
        state: Any = dict(value.named_parameters()) if isinstance(value, torch.nn.Module) else value
        # Lazy parameters have no data yet.
        is_lazy = torch.nn.parameter.is_lazy
        found = [each for each in state.values() if isinstance(each, torch.Tensor) and not is_lazy(each)]
        dtypes: dict[str, dict[str, int]] = {}
        for each in found:
            name = str(each.dtype).removeprefix("torch.")
            count = dtypes.setdefault(name, {"tensors": 0, "parameters": 0, "bytes": 0})
            for key, number in (("tensors", 1), ("parameters", each.numel()), ("bytes", each.nbytes)):
                count[key] += number
        if found:
            parameters = sum(count["parameters"] for count in dtypes.values())
            summary |= {"tensors": len(found), "parameters": parameters, "dtypes": dtypes}
    return summary
