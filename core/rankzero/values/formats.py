"""How a value becomes a file and back: json, safetensors, cloudpickle.

* ``json`` for values that JSON gives back exactly as they were;
* ``safetensors`` for a dict of tensors: loading maps the file and runs no code;
* ``cloudpickle`` for everything else, and for tensors that share storage (tied weights), which
  safetensors refuses.

This module runs inside workers, where only the standard library and torch are there, so the
safetensors codec is ours; the tests hold it against the safetensors library in both directions.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import mmap
import os
import pickle
import queue
import struct
import sys
import threading
from collections import OrderedDict
from typing import IO, TYPE_CHECKING, Any, Protocol

from rankzero import store
from rankzero.errors import ResultError

if TYPE_CHECKING:
    import torch

JSON, SAFETENSORS, CLOUDPICKLE = "json", "safetensors", "cloudpickle"
DIRECTORY = "tar"
"""A directory tree, for checkpoints."""
DISTRIBUTED = "dcp.tar"
"""One rank's directory of what ``torch.distributed.checkpoint`` saved: of use with those of all ranks."""
SHARDS = "shards"
"""One rank's pieces of a sharded state, for checkpoints: see `rankzero.values.shards`."""

_HASH_CHUNK = 16 << 20
_HASH_BESIDE = 1 << 20
_HASH_BEHIND = 16
"""Chunks by which hashing may be behind writing: tensors of a GPU have copies for so long."""

_HEADER_LENGTH = struct.Struct("<Q")
_HEADER_ALIGNMENT = 8
_MAX_HEADER = 100 << 20

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class Writable(Protocol):
    """What bytes are written to."""

    def write(self, data: Any, /) -> object:
        """Takes all of them."""


def is_json(value: object) -> bool:
    """True if JSON gives the value back exactly: same types, string keys, no tuples."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(is_json(item) for item in value)
    if type(value) is dict:
        return all(type(key) is str and is_json(item) for key, item in value.items())
    return False


def choose(value: object) -> str:
    """The format in which a value is stored."""
    if _is_plain_tensor_dict(value):
        return SAFETENSORS
    return JSON if is_json(value) else CLOUDPICKLE


def summarize(value: object) -> dict[str, Any]:
    """What a person wants to know of a value without loading it."""
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    summary: dict[str, Any] = {"type": name}
    if torch_module := sys.modules.get("torch"):
        state = value
        if isinstance(value, torch_module.nn.Module):
            state = dict(value.named_parameters())
        if isinstance(state, dict) and state:
            tensors = [item for item in state.values() if isinstance(item, torch_module.Tensor)]
            if tensors:
                summary["tensors"] = len(tensors)
                summary["parameters"] = sum(tensor.numel() for tensor in tensors)
                summary["dtypes"] = _count_dtypes(tensors)
    return summary


def _count_dtypes(tensors: list[torch.Tensor]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        count = counts.setdefault(name, {"tensors": 0, "parameters": 0, "bytes": 0})
        count["tensors"] += 1
        count["parameters"] += tensor.numel()
        count["bytes"] += tensor.numel() * tensor.element_size()
    return counts


def write(value: object, file_format: str, path: str) -> tuple[int, str]:
    """Writes a value to a local file.

    Returns:
        The file's size in bytes and its sha256, hex.

    Raises:
        ResultError: the value cannot be pickled; names its type.
    """
    with open(path, "wb") as file:
        facts = write_to(value, file_format, file)
        file.flush()
        os.fsync(file.fileno())
        return facts


def write_to(value: object, file_format: str, file: Writable) -> tuple[int, str]:
    """Writes a value to an open file; as `write`."""
    with contextlib.closing(_HashingWriter(file)) as sink:
        if file_format == JSON:
            sink.write(json.dumps(value).encode())
        elif file_format == SAFETENSORS:
            _write_safetensors(value, sink)  # type: ignore[arg-type]
        else:
            _write_cloudpickle(value, sink)
        return sink.size, sink.hexdigest()


def is_distributed(directory: str) -> bool:
    """True for a directory that ``torch.distributed.checkpoint`` wrote."""
    return any(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(directory))


def write_directory(directory: str, path: str) -> tuple[int, str]:
    """Writes a directory tree as one uncompressed tar file; returns like `write`."""
    import tarfile

    with open(path, "wb") as file, contextlib.closing(_HashingWriter(file)) as sink:
        # Links are followed: what they point to may not be there where the checkpoint is opened.
        with tarfile.open(fileobj=sink, mode="w|", dereference=True) as archive:
            archive.add(directory, arcname=".")
        file.flush()
        os.fsync(file.fileno())
        return sink.size, sink.hexdigest()


def read_directory(path: str, sha256: str, target: str) -> None:
    """Unpacks what `write_directory` wrote into ``target``. Raises ResultError if the checksum differs."""
    import tarfile

    try:
        with open(path, "rb") as file:
            _verify(file, sha256)
            with tarfile.open(fileobj=file) as archive:
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(target, filter="data")
                else:
                    archive.extractall(target)
    except tarfile.TarError as error:
        raise ResultError(f"{path} cannot be unpacked: {error}") from error


def read(path: str, file_format: str, sha256: str | None, fingerprint: str | None = None) -> Any:
    """Loads a value from a local file if it is what was written.

    Args:
        path: The file.
        file_format: One of this module's.
        sha256: Its checksum, hex; None checks nothing.
        fingerprint: `rankzero.store.fingerprint` of a safetensors file when it had that checksum. While it is the same,
            the file is not read for it.

    Raises:
        ResultError: the checksum differs, or the format is unknown.
    """
    with open(path, "rb") as file:
        # What was looked at is what is opened, whatever comes to be under its name. What runs code is always read.
        is_known = file_format == SAFETENSORS and store.fingerprint(file.fileno()) == fingerprint
        if sha256 is not None and not is_known:
            _verify(file, sha256)
        if file_format == SAFETENSORS:
            return _read_safetensors(file)
        if file_format == JSON:
            return json.load(file)
        if file_format == CLOUDPICKLE:
            return pickle.load(file)
    raise ResultError(f"unknown result format {file_format!r} of {path}")


def _verify(file: IO[bytes], sha256: str) -> None:
    actual = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    if actual != sha256:
        raise ResultError(
            f"{file.name} has sha256 {actual[:16]}..., but {sha256[:16]}... was recorded: "
            "the file was changed or damaged after it was committed"
        )
    file.seek(0)


class _HashingWriter(io.RawIOBase):
    """Counts and hashes what passes through to a file; both leave the interpreter's lock, so each has a core."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._behind: queue.Queue[Any] = queue.Queue(_HASH_BEHIND)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self.write_lasting(data)
        finally:
            # Who calls may use the memory for something else.
            self._behind.join()

    def write_lasting(self, data: Any, owner: object = None) -> int:
        """Writes what does not change before `hexdigest` is asked for: hashing may fall behind.

        Args:
            data: Bytes, or anything that has the buffer of some.
            owner: What is to live as long as it is needed.
        """
        view = memoryview(data).cast("B")
        if len(view) < _HASH_BESIDE:
            self._behind.join()
            self._digest.update(view)
            self._file.write(view)
        else:
            for start in range(0, len(view), _HASH_CHUNK):
                chunk = view[start : start + _HASH_CHUNK]
                self._hash_beside(chunk, owner)
                self._file.write(chunk)
        self.size += len(view)
        return len(view)

    def _hash_beside(self, chunk: memoryview, owner: object) -> None:
        if self._thread is None:
            # Not one of `concurrent.futures`: exit handlers, which may save something, get none there.
            thread = threading.Thread(target=self._hash, name="rankzero-sha256", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # Nor here since CPython 3.12; or the system has none left.
                self._digest.update(chunk)
                return
            self._thread = thread
        self._behind.put((chunk, owner))

    def _hash(self) -> None:
        while (item := self._behind.get()) is not None:
            try:
                self._digest.update(item[0])
            except BaseException as error:
                self._failure = error
            del item
            self._behind.task_done()

    def hexdigest(self) -> str:
        """The sha256 of all that was written, hex; raises what hashing it raised."""
        self._behind.join()
        if self._failure:
            raise self._failure
        return self._digest.hexdigest()

    def close(self) -> None:
        """Ends its thread, with the memory that it holds; the file stays open."""
        if self._thread is not None:
            self._behind.put(None)
            self._thread.join()
            self._thread = None
        super().close()


def _write_cloudpickle(value: object, sink: _HashingWriter) -> None:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch and type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
                # The reader may have no GPU.
                return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    try:
        Pickler(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except OSError:
        raise
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ResultError(
            f"a value of type {name} cannot be pickled: {error}. Return its state (a state_dict, numbers) instead; "
            "metrics and logs of a run are kept"
        ) from error


def _is_plain_tensor_dict(value: object) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (dict, OrderedDict) or not value:
        return False
    assert isinstance(value, dict)
    known = {getattr(torch, name) for name in _DTYPES.values()}
    storages = set()
    for key, item in value.items():
        if type(key) is not str or key == "__metadata__" or not isinstance(item, torch.Tensor):
            return False
        if item.layout != torch.strided or item.dtype not in known or item.device.type == "meta":
            return False
        if item.is_quantized or type(item) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if item.numel():
            storages.add((item.device, item.untyped_storage().data_ptr()))
    return len(storages) == sum(1 for item in value.values() if item.numel())


def _place_in_file(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.numel() * tensor.element_size() >= _HASH_BESIDE, name


def _write_safetensors(tensors: dict[str, torch.Tensor], sink: _HashingWriter) -> None:
    # Widest types first, so that every tensor is aligned in the file and can be mapped; in each the small ones first,
    # for they do not wait to be hashed.
    ordered = sorted(tensors.items(), key=_place_in_file)
    names = {dtype: name for name, dtype in _DTYPES.items()}
    places = {}
    offset = 0
    for key, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        places[key] = {
            "dtype": names[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    # The header keeps the caller's order, whatever the order of the bytes.
    header = {"__metadata__": {"format": "pt"}, **{key: places[key] for key in tensors}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    sink.write(_HEADER_LENGTH.pack(len(text)) + text)
    for _, tensor in ordered:
        here = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        length = here.numel() * here.element_size()
        if length:
            sink.write_lasting((ctypes.c_char * length).from_address(here.data_ptr()), here)


def _read_safetensors(file: IO[bytes]) -> dict[str, torch.Tensor]:
    """Maps the file copy-on-write: pages come in when they are used, the file never changes.

    Every tensor has a storage of its own within the map. Views of one storage would each be
    pickled with all of it, and could not be written as safetensors again.
    """
    import torch

    total = os.fstat(file.fileno()).st_size
    prefix = file.read(_HEADER_LENGTH.size)
    length = _HEADER_LENGTH.unpack(prefix)[0] if len(prefix) == _HEADER_LENGTH.size else -1
    if not 0 < length <= min(_MAX_HEADER, total):
        raise ResultError(f"{file.name} is not a safetensors file")
    header: dict[str, Any] = json.loads(file.read(length))
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    start = _HEADER_LENGTH.size + length
    tensors = {}
    for key, entry in header.items():
        dtype: torch.dtype = getattr(torch, _DTYPES[entry["dtype"]])
        begin, end = (start + position for position in entry["data_offsets"])
        width = torch.empty(0, dtype=dtype).element_size()
        if not start <= begin <= end <= total:
            raise ResultError(f"{file.name}: tensor {key!r} lies outside the file")
        if begin == end:
            tensors[key] = torch.empty(entry["shape"], dtype=dtype)
        elif begin % width:
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)
            tensors[key] = raw.clone().view(dtype).reshape(entry["shape"])
        else:
            count = (end - begin) // width
            tensors[key] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin).reshape(entry["shape"])
    return tensors
