"""Writes a value to a file and reads it back: json, torch, pickle.

* ``json`` for values that JSON returns unchanged;
* ``torch`` for tensors in dicts, lists and tuples of such values: a file of `torch.save`, which any program loads by
  ``torch.load(file, weights_only=True, mmap=True)``. It runs no code, and tensors are mapped from the file;
* ``pickle`` for everything else, by cloudpickle, with large buffers beside the pickle.

A written file is loaded once: a value that cannot be read back fails while it still exists.

`summarize` describes a value for display: type, tensors, parameters, bytes.

This module runs inside workers: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.host.processes import fork_safe
from rankzero.values import digest as digests
from rankzero.values import pickled, tensors
from rankzero.values.digest import HashingFile, Writable
from rankzero.values.plain import is_json

if TYPE_CHECKING:
    import tarfile

    import torch


__all__ = ["DIRECTORY", "JSON", "PICKLE", "TORCH", "choose", "read", "summarize", "write"]

JSON, TORCH, PICKLE = "json", "torch", "pickle"
DIRECTORY = "tar"
"""Format of a directory tree, for checkpoints."""
DISTRIBUTED = "dcp.tar"
"""Format of one rank's directory from ``torch.distributed.checkpoint``, which is loaded with those of all ranks."""
SHARDS = "shards"
"""Format of one rank's pieces of a sharded state, for checkpoints: see `rankzero.values.sharded`."""

_TAR_WRITES = 1 << 20


def choose(value: object) -> str:
    """Chooses the format in which a value is stored."""
    if is_json(value):
        return JSON
    # Some kinds of tensors lack attributes of others and raise any exception.
    with contextlib.suppress(Exception):
        if tensors.tensors_in(value):
            return TORCH
    return PICKLE


def write(value: object, file_format: str, path: str) -> tuple[int, str]:
    """Writes a value to a local file.

    Returns:
        The file's size in bytes and its digest (`rankzero.values.digest`).

    Raises:
        ResultError: the value cannot be pickled, or the file cannot be read back; the message has the value's type.
    """
    with open(path, "w+b") as file, digests.FileDigest(file) as digest:
        _dump(value, file_format, digest)
        digest.flush()
        if file_format != JSON:
            with pickled.proving(value):
                _read(file, path, file_format)
        # The disk writes while the cores hash.
        text = digest.text(functools.partial(os.fsync, file.fileno()))
        return os.fstat(file.fileno()).st_size, text


def write_to(value: object, file_format: str, file: Writable) -> tuple[int, str]:
    """Writes a value to an open file like `write`, but does not read it back."""
    hashing = HashingFile(file)
    _dump(value, file_format, hashing)
    return hashing.size, hashing.text()


def _dump(value: object, file_format: str, file: Writable) -> None:
    if file_format == JSON:
        file.write(json.dumps(value).encode())
    elif file_format == TORCH:
        import torch

        copy = tensors.prepared(value)
        with _without_crc32(torch.serialization):
            try:
                torch.save(copy, file, pickle_protocol=2)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch's own error about a file that it could not finish hides that of the file.
                raise error.__context__ or error from None
    else:
        for part in pickled.pickled(value):
            file.write(part)


_CRC32_LOCK = fork_safe(threading.Lock())


@contextlib.contextmanager
def _without_crc32(serialization: Any) -> Iterator[None]:
    """Switches off torch's own checksums, which take as long as writing; torch.load does not compare them."""
    with _CRC32_LOCK:
        # Older versions of torch lack the option, which counts for the process.
        is_on = hasattr(serialization, "get_crc32_options") and serialization.get_crc32_options()
        if is_on:
            serialization.set_crc32_options(False)
        try:
            yield
        finally:
            if is_on:
                serialization.set_crc32_options(True)


def is_distributed(directory: str) -> bool:
    """Returns True for a directory that ``torch.distributed.checkpoint`` wrote."""
    return any(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(directory))


def _entry(read: Callable[..., Any], name: str, *more: Any) -> Any:
    """Returns the tar entry of a file or folder; None leaves out pipes, and links that cannot be followed."""
    if os.path.islink(name):
        inside = os.path.join(os.path.realpath(os.path.dirname(name)), "")
        if not os.path.exists(name) or inside.startswith(os.path.join(os.path.realpath(name), "")):
            print(f"rankzero: the checkpoint leaves out {name}, a link to {os.readlink(name)} that cannot be followed")
            return None
    mode = os.stat(name).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        print(f"rankzero: the checkpoint leaves out {name}, which is neither a file nor a directory")
        return None
    return read(name, *more)


def write_directory(directory: str, path: str) -> tuple[int, str]:
    """Writes a directory tree as one uncompressed tar file; returns like `write`."""
    import tarfile

    with open(path, "wb") as file:
        sink = HashingFile(file)
        # Links are followed: their targets may not exist where the checkpoint is opened.
        writing: Any = {"fileobj": sink, "mode": "w|", "dereference": True, "bufsize": _TAR_WRITES}
        with tarfile.open(**writing) as archive:
            archive.gettarinfo = functools.partial(_entry, archive.gettarinfo)  # type: ignore[method-assign]
            archive.add(directory, arcname=".")
        file.flush()
        os.fsync(file.fileno())
        return sink.size, sink.text()


def unpack(archive: tarfile.TarFile, target: str | os.PathLike[str]) -> None:
    """Unpacks an archive that rankzero made, and whose checksum was verified, into a directory."""
    import tarfile

    # Python 3.11.0 to 3.11.3, which Debian 12 has, has no filters.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
    else:
        archive.extractall(target)


def read_directory(path: str, digest: str, target: str) -> None:
    """Unpacks a file of `write_directory` into ``target``. Raises ResultError if the digest differs."""
    import tarfile

    try:
        with open(path, "rb") as file:
            digests.verify(file, digest)
            with tarfile.open(fileobj=file) as archive:
                unpack(archive, target)
    except tarfile.TarError as error:
        raise ResultError(f"{path} cannot be unpacked: {error}") from error


def read(path: str, file_format: str, digest: str | None) -> Any:
    """Loads a value from a local file after it has compared the digest.

    Args:
        path: The file.
        file_format: One of this module's formats.
        digest: The recorded digest; None skips the comparison.

    Raises:
        OSError: the file cannot be opened.
        ResultError: the digest differs, the format is unknown, or an object cannot be created here.
    """
    with open(path, "rb") as file:
        return read_open(file, path, file_format, digest)


def read_open(file: IO[bytes], location: str, file_format: str, digest: str | None) -> Any:
    """Loads a value from an open file, like `read`. The location is named in errors."""
    try:
        # By the descriptor, so that the checked file is the one that is loaded, even if its name is replaced.
        if digest is not None:
            digests.verify(file, digest, location)
        return _read(file, location, file_format)
    except ResultError:
        raise
    except Exception as error:
        raise ResultError(_why_not(location, file_format, error)) from error


def _read(file: IO[bytes], location: str, file_format: str) -> Any:
    if file_format == JSON:
        return json.load(file)
    if file_format == TORCH:
        import torch

        # torch maps a file by its name; a mapping is private, so that the file is never changed.
        return torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)
    if file_format == PICKLE:
        return pickled.open_packed(file.fileno(), pickled.Loader)
    raise ResultError(f"unknown result format {file_format!r} of {location}")


def _why_not(path: str, file_format: str, error: Exception) -> str:
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return f"the result {path} cannot be read: {what}"
    if file_format != PICKLE and not isinstance(error, ImportError):
        return f"the result {path} cannot be loaded, it is not a {file_format} file that rankzero wrote: {what}"
    do = pickled.advice(error) or "Its class cannot be created here: return plain values or a state_dict instead"
    return f"the result {path} is whole, but cannot be loaded here: {what}. {do}"


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module."""
    cls = type(value)
    # A user's class may have set these to any object.
    module, name = str(cls.__module__), str(cls.__qualname__)
    return name if module == "builtins" else f"{module}.{name}"


def summarize(value: object) -> dict[str, Any]:
    """Returns the type of a value and, for a module or a dict of tensors, counts by data type. Never fails.

    Example:
        >>> summarize([1, 2])
        {'type': 'list'}
    """
    summary: dict[str, Any] = {"type": type_name(value)}
    # Objects of the user may raise anything, and that must not fail a training that has finished.
    with contextlib.suppress(Exception):
        summary |= _count(value)
    return summary


def _count(value: object) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    state = dict(value.named_parameters()) if isinstance(value, torch.nn.Module) else value
    if not isinstance(state, dict):
        return {}
    tensors = [item for item in state.values() if isinstance(item, torch.Tensor)]
    if not tensors:
        return {}
    dtypes: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        numbers = _numbers(tensor)
        count = dtypes.setdefault(str(tensor.dtype).removeprefix("torch."), {"tensors": 0, "parameters": 0, "bytes": 0})
        count["tensors"] += 1
        count["parameters"] += numbers
        count["bytes"] += numbers * tensor.element_size()
    return {
        "tensors": len(tensors),
        "parameters": sum(count["parameters"] for count in dtypes.values()),
        "dtypes": dtypes,
    }


def _numbers(tensor: torch.Tensor) -> int:
    try:
        return tensor.numel()
    except Exception:
        # A parameter of a lazy module that has seen no data yet.
        return 0
