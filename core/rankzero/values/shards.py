"""Writes a sharded state as one file for each rank, which a world of any size can read.

A file holds the bytes of the rank's pieces of sharded tensors (DTensors of FSDP2 and tensor parallelism, and
ShardedTensors of FSDP1), then the rest of the state as a pickle, then an index: for each piece the name and shape of
its tensor, its place in that tensor and in the file, and its sha256. The last 8 bytes are the index's length. Only the
sha256 of the index is recorded outside of the file, so each piece can be verified alone, and a reader reads only the
pieces that overlap with its own. The indexes of all files are also stored together beside them: else a reader would
open a thousand files to learn that it needs two.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values import pickled
from rankzero.values.digest import Writable

if TYPE_CHECKING:
    import torch

LENGTH = struct.Struct("<Q")

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Pieces:
    """The pieces of a sharded tensor on this rank.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Data type of the tensor.
        pieces: Offsets in the whole tensor, and the local tensor. Some ranks have none.
        replicas: For each dimension of the mesh along which the pieces are replicated: this rank's coordinate, and the
            number of replicas.
    """

    shape: list[int]
    dtype: torch.dtype
    pieces: list[tuple[list[int], torch.Tensor]]
    replicas: list[tuple[int, int]] = field(default_factory=list)

    def __reduce__(self) -> str:
        """Raises ResultError: pieces stand in dicts and lists, from where `write_to` takes them."""
        raise ResultError("a sharded tensor lies within an object: a checkpoint has them in dicts and lists")

    def is_written_here(self, name: str) -> bool:
        """Returns True on one of the ranks with the same pieces, which differs from tensor to tensor."""
        return all(zlib.crc32(name.encode()) % count == place for place, count in self.replicas)


def is_sharded(tensor: Any) -> bool:
    """Returns True for a DTensor or ShardedTensor."""
    return hasattr(tensor, "placements") or hasattr(tensor, "local_shards")


def has_sharded(state: Any) -> bool:
    """Returns True if dicts, lists and tuples contain a DTensor or ShardedTensor at any depth."""
    waiting, seen = [state], set()
    while waiting:
        value = waiting.pop()
        if is_sharded(value):
            return True
        # A state may contain itself.
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return False


def pieces_of(tensor: Any) -> Pieces:
    """Returns this rank's pieces of a sharded tensor without a copy. Raises ResultError for partial placements."""
    shape = list(tensor.size())
    if hasattr(tensor, "local_shards"):
        shards = [(list(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()]
        return Pieces(shape, tensor.dtype, shards)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Pieces(shape, tensor.dtype, [])
    if any(placement.is_partial() for placement in tensor.placements):
        raise ResultError(f"a DTensor with the placements {tensor.placements} cannot be saved: redistribute() it first")
    # torch.distributed.checkpoint computes the offsets with this function.
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    local = tensor.to_local()
    (chunk,) = _create_chunk_list(tensor)
    replicas = [
        (coordinate[dim], tensor.device_mesh.size(dim))
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    ]
    return Pieces(shape, tensor.dtype, [(list(chunk.offsets), local)] if local.numel() else [], replicas)


def walk(value: Any, visit: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Returns a copy of ``value``, made of plain dicts, lists and tuples, with each leaf replaced by ``visit``."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, walk(item, visit, (*path, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(walk(item, visit, (*path, index)) for index, item in enumerate(value))
    return visit(path, value)


def name_of(path: Path) -> str:
    """Returns the name of the tensor at a path, which is the same in every rank."""
    return ".".join(map(str, path))


# -- writing -------------------------------------------------------------------------------------


def write_to(state: Any, file: Writable) -> tuple[int, str, str]:
    """Writes this rank's part of a state in which `Pieces` stand for sharded tensors.

    Returns:
        The file's size in bytes, the sha256 of its index, hex, and the index, one line of JSON.

    Raises:
        ResultError: two sharded tensors have one name, one is inside an object, or the rest cannot be pickled or read
            again.
    """
    writer = _Writer(file)
    tensors: dict[str, Any] = {}

    def place(path: Path, value: Any) -> Any:
        if not isinstance(value, Pieces):
            return value
        name = name_of(path)
        if name in tensors:
            raise ResultError(f"two sharded tensors of a checkpoint have the name {name!r}")
        written = value.pieces if value.is_written_here(name) else []
        pieces = [
            {"offsets": offsets, "sizes": list(local.shape), **writer.tensor(local)} for offsets, local in written
        ]
        dtype = str(value.dtype).removeprefix("torch.")
        tensors[name] = {"shape": value.shape, "dtype": dtype, "pieces": pieces}
        return Stored(name, value.shape, value.dtype)

    rest = b"".join(pickled.pickled(plain := walk(state, place)))
    with pickled.proving(plain):
        pickled.unpack(memoryview(rest), pickled.Loader)
    index = json.dumps({"tensors": tensors, "rest": writer.bytes(rest)}, separators=(",", ":"))
    facts = writer.bytes(index.encode())
    writer.bytes(LENGTH.pack(facts["length"]))
    return writer.size, facts["sha256"], index


class _Writer:
    def __init__(self, file: Writable) -> None:
        self._file = file
        self.size = 0

    def tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        here = tensor.detach().cpu().contiguous()
        length = here.numel() * here.element_size()
        return self.bytes(memoryview((ctypes.c_char * length).from_address(here.data_ptr())).cast("B"))

    def bytes(self, data: Any) -> dict[str, Any]:
        """Writes bytes; returns their place in the file, length and sha256."""
        at, length = self.size, len(data)
        self._file.write(data)
        self.size += length
        return {"at": at, "length": length, "sha256": hashlib.sha256(data).hexdigest()}


@dataclass(frozen=True)
class Stored:
    """Placeholder for a sharded tensor in the pickle."""

    name: str
    shape: list[int]
    dtype: torch.dtype
