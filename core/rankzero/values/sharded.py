"""Writes a sharded state as one file for each rank, which a world of any size can read.

The planners of ``torch.distributed.checkpoint`` name the pieces of a rank's DTensors (FSDP2, tensor parallelism) and
ShardedTensors (FSDP1) when they are written, and the pieces that a rank needs when they are read. Every rank plans
alone: no rank waits for another one, and a training may end its process groups while a checkpoint is written.

A rank's file holds the bytes of its pieces, then the rest of the state as a pickle. Its index, torch's metadata with
the place and the sha256 of each, goes to the driver, which stores the indexes of all ranks in one file.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

from rankzero.errors import ResultError
from rankzero.values import pickled, tensors
from rankzero.values.digest import Writable

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Place:
    """The place of some bytes in a rank's file, and the sizes of the piece of a tensor that they are."""

    at: int
    length: int
    sha256: str
    sizes: tuple[int, ...] = ()
    is_sharded: bool = False


@dataclass(frozen=True)
class Stored:
    """Placeholder for a tensor in the pickle."""

    name: str


def is_sharded(tensor: Any) -> bool:
    """Returns True for a DTensor or ShardedTensor."""
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(tensor, torch.Tensor)
    return is_tensor and (hasattr(tensor, "placements") or hasattr(tensor, "local_shards"))


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


def write_to(state: dict[Any, Any], file: Writable) -> dict[str, Any]:
    """Writes this rank's part of a state.

    Returns:
        The file's ``size``, the ``sha256`` of its index, and the index as the text ``pieces``.

    Raises:
        ResultError: a value cannot be pickled, or not be read back.
    """
    flat, rest = _flat(state)
    metadata, items, planner = _plan({name: tensor for name, tensor in flat.items() if _is_written_here(name, tensor)})
    size = 0

    def write(data: Any, *facts: Any) -> Place:
        nonlocal size
        file.write(data)
        size += len(data)
        return Place(size - len(data), len(data), hashlib.sha256(data).hexdigest(), *facts)

    metadata.storage_data = {}
    for item in items:
        piece = planner.resolve_data(item).detach().cpu().contiguous()
        # Of a view only what it shows.
        data = tensors.memory_of(tensors.compact(piece).untyped_storage())
        sizes = tuple(item.tensor_data.chunk.sizes)
        metadata.storage_data[item.index] = write(data, sizes, is_sharded(flat[item.index.fqn]))
    others = b"".join(pickled.pickled(rest))
    with pickled.reading_back(rest):
        pickled.unpack(memoryview(others), pickled.Loader)
    metadata.planner_data = write(others)
    text = base64.b64encode(zlib.compress(pickle.dumps(metadata), 1)).decode()
    return {"size": size, "sha256": hashlib.sha256(text.encode()).hexdigest(), "pieces": text}


def _walk(value: Any, visit: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Returns a copy of ``value``, made of plain dicts, lists and tuples, with each leaf replaced by ``visit``."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _walk(item, visit, (*path, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_walk(item, visit, (*path, index)) for index, item in enumerate(value))
    return visit(path, value)


def _flat(state: Any) -> tuple[dict[str, Any], Any]:
    """Returns the tensors of a nested state by name, and the state with a `Stored` for each."""
    import torch

    flat: dict[str, Any] = {}

    def place(path: Path, value: Any) -> Any:
        is_dense = isinstance(value, torch.Tensor) and tensors.is_dense(value)
        if not (is_sharded(value) or is_dense):
            return value
        if (name := ".".join(map(str, path))) in flat:
            raise ResultError(f"two tensors of a checkpoint have the name {name!r}")
        flat[name] = value
        return Stored(name)

    return flat, _walk(state, place)


def _names(value: Any) -> list[str]:
    """Returns the names of the tensors that `_flat` took out of a state."""
    names: list[str] = []
    _walk(value, lambda _, leaf: names.append(leaf.name) if isinstance(leaf, Stored) else None)
    return names


def _plan(flat: dict[str, Any]) -> tuple[Any, list[Any], Any]:
    """Returns torch's metadata of a flat state, what this rank has to write of it, and the planner."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(flat, is_coordinator=True)
    plans, metadata = create_default_global_save_plan([planner.create_local_plan()])
    return metadata, plans[0].items, planner


def _is_written_here(name: str, tensor: Any) -> bool:
    """Returns True on one of the ranks with the same pieces, which differs from tensor to tensor."""
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise ResultError(f"a DTensor with the placements {tensor.placements} cannot be saved: redistribute() it first")
    mesh: Any = getattr(tensor, "device_mesh", None)
    place = mesh and mesh.get_coordinate()
    return place is None or all(
        zlib.crc32(name.encode()) % mesh.size(dim) == place[dim]
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


class ShardedState:
    """A sharded state, open for reading: the files that all ranks wrote."""

    def __init__(
        self,
        rank: str,
        parts: Mapping[str, Mapping[str, Any]],
        indexes: Mapping[str, bytes],
        open_part: Callable[[str], IO[bytes]],
    ) -> None:
        """Reads the indexes of all ranks, which `write_to` has returned, and no file.

        Values that are not sharded are those of the given rank. Ranks are text; ``open_part`` opens a rank's file.

        Raises:
            ResultError: an index is damaged, pieces are missing, or two ranks wrote different values for one piece.
        """
        self._open_part = open_part
        self._files: dict[str, IO[bytes]] = {}
        self._places: dict[Any, tuple[str, Place]] = {}
        self._metadata: Any = None
        self._rank = rank
        for writer in sorted(parts, key=lambda each: (each != rank, int(each))):
            index = _proved(indexes.get(writer, b""), parts[writer]["sha256"])
            self._merge(writer, pickle.loads(zlib.decompress(base64.b64decode(index))))
        # By rank, and in the order in which they lie in the file.
        metadata: Any = self._metadata
        metadata.storage_data = self._places
        for name, entry in metadata.state_dict_metadata.items():
            if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
                raise ResultError(f"the pieces of {name!r} in the checkpoint are not the whole tensor")

    def _merge(self, rank: str, metadata: Any) -> None:
        """Adds the metadata of one more rank."""
        merged: Any = self._metadata or metadata
        self._metadata = merged
        for key, place in metadata.storage_data.items():
            writer, known = self._places.setdefault(key, (rank, place))
            if known is place:
                entry = metadata.state_dict_metadata[key.fqn]
                if (first := merged.state_dict_metadata.setdefault(key.fqn, entry)) is not entry:
                    first.chunks += [chunk for chunk in entry.chunks if chunk.offsets == key.offset]
            elif place.is_sharded and known.sha256 != place.sha256:
                raise ResultError(
                    f"ranks {writer} and {rank} wrote different values of {key.fqn!r} into the checkpoint, as pipeline "
                    "stages do whose modules name their tensors alike: give each stage names of its own"
                )

    def __enter__(self) -> ShardedState:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def load(self, target: Any = None) -> Any:
        """Returns the state with whole tensors, or with those of a target, which are filled. Raises like `fill`."""
        import torch

        with pickled.loading(f"what rank {self._rank} wrote into the checkpoint cannot be loaded here"):
            data = self._bytes(self._rank, self._metadata.planner_data)
            rest = pickled.unpack(memoryview(data), pickled.Loader)
        filled = {} if target is None else _flat(target)[0]
        places = {} if target is None else self._places
        sharded = {key.fqn for key, (_, place) in places.items() if place.is_sharded}
        wanted = [key for key in rest if key in (target or ()) or not sharded.intersection(_names(rest[key]))]
        rest = type(rest)((key, rest[key]) for key in wanted)
        for key in wanted:
            for name in _names(rest[key]):
                if target is None or key not in target:
                    entry = self._metadata.state_dict_metadata[name]
                    filled[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
                elif name not in filled:
                    raise ResultError(
                        f"the checkpoint holds {name!r}, which the state to be filled has not: give the states of "
                        "model and optimizer as torch.distributed.checkpoint.state_dict makes them, or load() all"
                    )
        _fill(filled, self._metadata, self._piece)
        return _walk(rest, lambda _, value: filled[value.name] if isinstance(value, Stored) else value)

    def _piece(self, key: Any) -> Any:
        import torch

        rank, place = self._places[key]
        data = self._bytes(rank, place)
        dtype = self._metadata.state_dict_metadata[key.fqn].properties.dtype
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(place.sizes) if data else None

    def _bytes(self, rank: str, place: Place) -> bytearray:
        if rank not in self._files:
            self._files[rank] = self._open_part(rank)
        file = self._files[rank]
        file.seek(place.at)
        data = bytearray(place.length)
        view = memoryview(data)
        while view and (count := file.readinto(view)):  # type: ignore[attr-defined]
            view = view[count:]
        return _proved(data, place.sha256)  # type: ignore[no-any-return]


def _proved(data: Any, sha256: str) -> Any:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ResultError("a part of the checkpoint was changed or damaged after it was committed", is_damage=True)
    return data


def fill(target: Any, state: Any) -> Any:
    """Fills the tensors of ``target``, sharded ones with their pieces, from a whole state, and returns that with them.

    Raises:
        ResultError: a tensor of ``target`` is missing or has another shape, and nothing is filled.
    """
    flat, rest = _flat(state)
    given = _flat(target)[0]
    metadata, _, _ = _plan({name: tensor for name, tensor in flat.items() if name in given})
    _fill(given, metadata, lambda key: flat[key.fqn])
    found = {**flat, **given}
    return _walk(rest, lambda _, value: found[value.name] if isinstance(value, Stored) else value)


def _fill(given: dict[str, Any], metadata: Any, piece: Callable[[Any], Any]) -> None:
    """Fills tensors by name from what the metadata lists; ``piece`` returns the piece of a tensor under a key of it."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    saved = metadata.state_dict_metadata
    for name, tensor in given.items():
        # Older versions of torch would fill a part of it.
        if name in saved and (shape := list(saved[name].size)) != (own := list(tensor.size())):
            raise ResultError(f"{name!r} has the shape {shape} in the checkpoint, and {own} in the state to be filled")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(given, metadata, is_coordinator=True)
    order = {key: number for number, key in enumerate(metadata.storage_data or ())}
    try:
        items = sorted(planner.create_local_plan().items, key=lambda item: order.get(item.storage_index, 0))
    except RuntimeError as error:
        why = str(error).rstrip(".")
        raise ResultError(
            f"the checkpoint does not fit into the state to be filled: {why}. Give a state without that tensor, or "
            "load() what there is"
        ) from error
    last = source = None
    for item in items:
        # A piece of one file may be needed in several places.
        if item.storage_index != last:
            last, source = item.storage_index, piece(item.storage_index)
        if (part := source) is not None:
            for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, begin, length)
            planner.resolve_tensor(item).detach().copy_(part)
