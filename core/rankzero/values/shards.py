"""A state of which each rank has a part, as files that a world of any size reads: one file of each rank.

A file holds the bytes of this rank's pieces of sharded tensors (DTensors, as FSDP2 and tensor parallelism make them,
and ShardedTensors of FSDP1), then everything else of the state as a pickle, then an index: of each piece its tensor's
name and shape, its place in that tensor and in the file, and its sha256. The last 8 bytes are the index's length. The
sha256 of the index stands for the file, so what is read of it is verified by itself, and a reader needs only the pieces
that overlap with what its rank has.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import IO, TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values.formats import Writable

if TYPE_CHECKING:
    import torch

_LENGTH = struct.Struct("<Q")

Path = tuple[Any, ...]
Copy = Callable[[Any, list[int], Any], None]


@dataclass(frozen=True)
class Pieces:
    """What this rank has of a sharded tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of the tensor.
        pieces: Offsets in the whole tensor, and the local tensor. Some ranks have none.
        replicas: For each dimension of the mesh along which others have the same: this rank's place, how many have it.
    """

    shape: list[int]
    dtype: torch.dtype
    pieces: list[tuple[list[int], torch.Tensor]]
    replicas: list[tuple[int, int]] = field(default_factory=list)

    def is_written_here(self, name: str) -> bool:
        """True for one of the ranks that have the same; which one it is differs from tensor to tensor."""
        return all(zlib.crc32(name.encode()) % count == place for place, count in self.replicas)


def is_sharded(tensor: Any) -> bool:
    """True for a DTensor or ShardedTensor."""
    return hasattr(tensor, "placements") or hasattr(tensor, "local_shards")


def has_sharded(state: Any) -> bool:
    """True if a DTensor or ShardedTensor is somewhere in dicts, lists and tuples."""
    waiting, seen = [state], set()
    while waiting:
        value = waiting.pop()
        if is_sharded(value):
            return True
        # A state may hold itself.
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return False


def pieces_of(tensor: Any) -> Pieces:
    """What this rank has of a sharded tensor, not copied. Raises ResultError if parts of it are still to be summed."""
    shape = list(tensor.size())
    if hasattr(tensor, "local_shards"):
        shards = [(list(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()]
        return Pieces(shape, tensor.dtype, shards)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Pieces(shape, tensor.dtype, [])
    if any(placement.is_partial() for placement in tensor.placements):
        raise ResultError(f"a DTensor with the placements {tensor.placements} cannot be saved: redistribute() it first")
    # The offsets as torch.distributed.checkpoint finds them.
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
    """``value`` with each leaf replaced by what ``visit`` makes of it; plain dicts, lists and tuples are made anew."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, walk(item, visit, (*path, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(walk(item, visit, (*path, index)) for index, item in enumerate(value))
    return visit(path, value)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


# -- writing -------------------------------------------------------------------------------------


def write_to(state: Any, file: Writable) -> tuple[int, str]:
    """Writes this rank's part of a state in which `Pieces` stand for sharded tensors.

    Returns:
        The file's size in bytes, and the sha256 of its index, hex.

    Raises:
        ResultError: two sharded tensors have one name, or one lies within an object.
    """
    writer = _Writer(file)
    tensors: dict[str, Any] = {}

    def place(path: Path, value: Any) -> Any:
        if not isinstance(value, Pieces):
            return value
        name = _name(path)
        if name in tensors:
            raise ResultError(f"two sharded tensors of a checkpoint have the name {name!r}")
        written = value.pieces if value.is_written_here(name) else []
        pieces = [
            {"offsets": offsets, "sizes": list(local.shape), **writer.tensor(local)} for offsets, local in written
        ]
        dtype = str(value.dtype).removeprefix("torch.")
        tensors[name] = {"shape": value.shape, "dtype": dtype, "pieces": pieces}
        return _Stored(name, value.shape, value.dtype)

    plain = walk(state, place)
    rest = io.BytesIO()
    _Pickler(rest, protocol=pickle.HIGHEST_PROTOCOL).dump(plain)
    index = json.dumps({"tensors": tensors, "rest": writer.bytes(rest.getbuffer())}, separators=(",", ":")).encode()
    writer.bytes(index)
    writer.bytes(_LENGTH.pack(len(index)))
    return writer.size, hashlib.sha256(index).hexdigest()


class _Writer:
    def __init__(self, file: Writable) -> None:
        self._file = file
        self.size = 0

    def tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        here = tensor.detach().cpu().contiguous()
        length = here.numel() * here.element_size()
        return self.bytes(memoryview((ctypes.c_char * length).from_address(here.data_ptr())).cast("B"))

    def bytes(self, data: Any) -> dict[str, Any]:
        """Writes it; where it lies."""
        at, length = self.size, len(data)
        self._file.write(data)
        self.size += length
        return {"at": at, "length": length, "sha256": hashlib.sha256(data).hexdigest()}


@dataclass(frozen=True)
class _Stored:
    """Stands for a sharded tensor in the pickle."""

    name: str
    shape: list[int]
    dtype: torch.dtype


def _Pickler(file: IO[bytes], protocol: int) -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> str | None:
            if isinstance(obj, Pieces):
                raise ResultError("a sharded tensor lies within an object: a checkpoint has them in dicts and lists")
            return obj.name if isinstance(obj, _Stored) else None

    return Pickler(file, protocol=protocol)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], tensors: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, name: Any) -> _Stored:
        import torch

        entry = self._tensors[name]
        return _Stored(name, entry["shape"], getattr(torch, entry["dtype"]))


# -- reading -------------------------------------------------------------------------------------


class ShardedState:
    """What all ranks wrote, open for reading."""

    def __init__(self, parts: Mapping[str, Mapping[str, Any]], open_part: Callable[[str], IO[bytes]]) -> None:
        """Reads nothing yet.

        Args:
            parts: By rank, as text: ``size`` and ``sha256``, as `write_to` gave them.
            open_part: Opens a rank's file.
        """
        self._parts = parts
        self._open_part = open_part
        self._files: dict[str, _File] = {}

    def __enter__(self) -> ShardedState:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def load(self, rank: str) -> Any:
        """The state with whole tensors; everything else as ``rank`` wrote it. Raises ResultError."""
        return walk(self._plain(rank), lambda _, value: self._whole(value) if isinstance(value, _Stored) else value)

    def load_into(self, rank: str, target: Any) -> Any:
        """The state with the tensors of ``target``, which are filled; as `fill`."""
        return fill(target, self._plain(rank), self._copy)

    def _plain(self, rank: str) -> Any:
        file = self._file(rank)
        return _Unpickler(io.BytesIO(file.read(file.index["rest"])), file.index["tensors"]).load()

    def _file(self, rank: str) -> _File:
        if rank not in self._files:
            part = self._parts[rank]
            self._files[rank] = _File(self._open_part(rank), part["size"], part["sha256"])
        return self._files[rank]

    def _pieces(self, stored: _Stored) -> list[tuple[str, dict[str, Any]]]:
        """Every piece of a tensor, with the rank that wrote it."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for rank in self._parts:
            if entry := self._file(rank).index["tensors"].get(stored.name):
                found |= {str([piece["offsets"], piece["sizes"]]): (rank, piece) for piece in entry["pieces"]}
        if sum(prod(piece["sizes"]) for _, piece in found.values()) != prod(stored.shape):
            raise ResultError(f"the pieces of {stored.name!r} in the checkpoint are not the whole tensor")
        return list(found.values())

    def _whole(self, stored: _Stored) -> torch.Tensor:
        import torch

        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self._copy(stored, [0] * len(stored.shape), whole)
        return whole

    def _copy(self, stored: _Stored, offsets: list[int], local: torch.Tensor) -> None:
        """Fills a local tensor, whose place in the whole one begins at ``offsets``."""
        dtype = stored.dtype
        for rank, piece in self._pieces(stored):
            if overlap(piece["offsets"], piece["sizes"], offsets, list(local.shape)) is not None:
                read = _tensor(self._file(rank).read(piece), dtype, piece["sizes"])
                copy_box(read, piece["offsets"], local, offsets)


class _File:
    """One rank's open file."""

    def __init__(self, file: IO[bytes], size: int, sha256: str) -> None:
        self._file = file
        length = _LENGTH.unpack(self._read(size - _LENGTH.size, _LENGTH.size))[0]
        if length > size - _LENGTH.size:
            raise ResultError("a part of the checkpoint is damaged: it has no index")
        place = {"at": size - _LENGTH.size - length, "length": length, "sha256": sha256}
        self.index: dict[str, Any] = json.loads(self.read(place))

    def read(self, place: Mapping[str, Any]) -> bytearray:
        """Bytes of the file that are what was written. Raises ResultError if they are not."""
        data = self._read(place["at"], place["length"])
        if hashlib.sha256(data).hexdigest() != place["sha256"]:
            raise ResultError("a part of the checkpoint was changed or damaged after it was committed")
        return data

    def _read(self, at: int, length: int) -> bytearray:
        self._file.seek(at)
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ResultError("a part of the checkpoint is shorter than what was committed")
            view = view[count:]
        return data

    def close(self) -> None:
        self._file.close()


def _tensor(data: bytearray, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(sizes)


# -- filling -------------------------------------------------------------------------------------


def fill(target: Any, state: Any, copy: Copy | None = None) -> Any:
    """The state that was saved, with the tensors of ``target`` in it: each is filled, a sharded one with its pieces.

    Args:
        target: The state of a model that trains now, with the same names.
        state: What was saved; sharded tensors as `_Stored`.
        copy: Fills a local tensor from one that was saved sharded; its offsets in the whole one are between the two.

    Raises:
        ResultError: a tensor that was saved sharded is not in ``target``, or has another shape.
    """
    tensors = {path: value for path, value in _leaves(target) if _is_tensor(value)}
    skipped: set[Any] = set()

    def place(path: Path, value: Any) -> Any:
        found = tensors.get(path)
        if found is not None and (isinstance(value, _Stored) or _is_tensor(value)):
            _fill_tensor(_name(path), found, value, copy)
            return found
        if isinstance(value, _Stored):
            if path[0] in target:
                raise ResultError(
                    f"the checkpoint holds {value.name!r}, which the state to be filled has not: give the states of "
                    "model and optimizer as torch.distributed.checkpoint.state_dict makes them, or load() whole tensors"
                )
            skipped.add(path[0])
        return value

    filled = walk(state, place)
    return {key: value for key, value in filled.items() if key not in skipped}


def _fill_tensor(name: str, target: Any, source: Any, copy: Copy | None) -> None:
    import torch

    shape = source.shape if isinstance(source, _Stored) else list(source.shape)
    if shape != list(target.size()):
        raise ResultError(
            f"{name!r} has the shape {shape} in the checkpoint, and {list(target.size())} in the state to be filled"
        )
    pieces = pieces_of(target).pieces if is_sharded(target) else [([0] * len(shape), target)]
    with torch.no_grad():
        for offsets, local in pieces:
            if isinstance(source, _Stored):
                assert copy is not None
                copy(source, offsets, local)
            else:
                copy_box(source, [0] * len(shape), local, offsets)


def _leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    walk(value, lambda path, leaf: found.append((path, leaf)))
    return iter(found)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or is_sharded(value)


def overlap(
    offsets: list[int], sizes: list[int], other_offsets: list[int], other_sizes: list[int]
) -> list[tuple[int, int]] | None:
    """Begin and end, in each dimension of the whole tensor, of what two boxes share; None if that is nothing."""
    shared = [
        (max(a, b), min(a + length, b + other))
        for a, length, b, other in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    ]
    return shared if all(begin < end for begin, end in shared) else None


def copy_box(source: torch.Tensor, source_offsets: list[int], target: torch.Tensor, target_offsets: list[int]) -> None:
    """Copies what two pieces of one tensor share."""
    shared = overlap(source_offsets, list(source.shape), target_offsets, list(target.shape))
    if shared is None:
        return
    for dim, (begin, end) in enumerate(shared):
        source = source.narrow(dim, begin - source_offsets[dim], end - begin)
        target = target.narrow(dim, begin - target_offsets[dim], end - begin)
    target.copy_(source)
