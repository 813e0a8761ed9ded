"""Sharded states: each rank stores its part like any value, and a world of any size fills its DTensors from the parts.

A DTensor (FSDP2, tensor parallelism) names its piece as it does for ``torch.distributed.checkpoint``, whose files have
one value for each name: of what ranks have of their own (random states, pipeline stages) they keep that of any rank.
No rank waits for another one. A rank reads its own part first, and those of others if the world or mesh have changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rankzero.errors import ResultError
from rankzero.values.pickled import is_dense, is_sharded


@dataclass(frozen=True)
class Shard:
    """A rank's piece of a DTensor: the shape of the whole, the offsets of the piece in it, and its numbers."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Any

    @classmethod
    def of(cls, tensor: Any) -> Shard:
        """Returns this rank's piece of a DTensor; a whole tensor is one. Raises ResultError if ranks have summands."""
        shape = tuple(tensor.shape)
        if not is_sharded(tensor):
            return cls(shape, (0,) * len(shape), tensor.detach())
        if any(placement.is_partial() for placement in tensor.placements):
            raise ResultError(f"a DTensor with the placements {tensor.placements} has no pieces: redistribute() it")
        return cls(shape, tuple(tensor.__create_chunk_list__()[0].offsets), tensor.to_local().detach())

    def fill(self, other: Shard) -> int:
        """Copies the numbers of another piece that lie in this one, and returns how many."""
        target, source = self.data, other.data
        if not (target.numel() and source.numel()):
            return 0
        for dim, (mine, its) in enumerate(zip(self.offsets, other.offsets, strict=True)):
            low, high = max(mine, its), min(mine + target.shape[dim], its + source.shape[dim])
            if low >= high:
                return 0
            target = target.narrow(dim, low - mine, high - low)
            source = source.narrow(dim, low - its, high - low)
        target.copy_(source)
        return int(target.numel())


def has_sharded(state: Any) -> bool:
    """Returns True if plain dicts, lists and tuples contain a DTensor; False for a state that contains itself."""
    with contextlib.suppress(RecursionError):
        return any(map(is_sharded, _tensors(state).values()))
    return False


def split(state: Any) -> Any:
    """Returns this rank's part of a state, with a `Shard` for each DTensor. Raises like `Shard.of`."""
    return _walk(state, lambda _, value: Shard.of(value) if is_sharded(value) else value)


def load(
    rank: int, others: Iterable[int], read: Callable[[int], Any], target: Any = None, *, is_same_world: bool = True
) -> Any:
    """Returns a state with whole tensors, or with those of a target, which are filled.

    Args:
        rank: The rank whose values that are not sharded are returned.
        others: The other ranks that wrote the state.
        read: Returns the part of a rank.
        target: A state with the same tensors; None for whole ones on the CPU. Top-level keys that it lacks are left out
            if they hold shards.
        is_same_world: Whether the part of this rank is enough if it has all pieces.

    Raises:
        ResultError: the target has other tensors or shapes, and nothing is filled; or pieces are missing or differ.
    """
    import torch

    own = copy.copy(read(rank))
    if isinstance(own, dict) and target is not None:
        for key in {path[0] for path, one in _tensors(own).items() if isinstance(one, Shard)}.difference(target):
            del own[key]
    saved = _tensors(own)
    shards = {path: one for path, one in saved.items() if isinstance(one, Shard)}
    if target is None:
        given = {path: torch.empty(one.shape, dtype=one.data.dtype, device="cpu") for path, one in shards.items()}
    else:
        given = _tensors(target)
        for path in [*given, *shards]:
            there, here = (list(each[path].shape) if path in each else None for each in (saved, given))
            if there != here:
                raise ResultError(
                    f"{_name(path)} has the shape {there} in the checkpoint, and {here} in the state to be filled: "
                    "give states of torch.distributed.checkpoint.state_dict, or load() all"
                )
    pieces = {path: Shard.of(tensor) for path, tensor in given.items()}
    missing = {path: piece.data.numel() for path, piece in pieces.items()}
    known: dict[Any, tuple[int, Any]] = {}
    for writer in (rank, *others):
        if writer != rank and is_same_world and not any(missing.values()):
            break
        for path, one in (saved if writer == rank else _tensors(read(writer))).items():
            if path not in pieces or (writer != rank and not isinstance(one, Shard)):
                continue
            piece = one if isinstance(one, Shard) else Shard.of(one)
            first, data = known.setdefault((path, piece.offsets, piece.data.shape), (writer, piece.data))
            if first == writer:
                missing[path] -= pieces[path].fill(piece)
            elif not torch.equal(data.reshape(-1).view(torch.uint8), piece.data.reshape(-1).view(torch.uint8)):
                raise ResultError(
                    f"ranks {first} and {writer} wrote different values of {_name(path)} into the checkpoint, as "
                    "pipeline stages do whose modules name their tensors alike: give each stage names of its own"
                )
    if incomplete := [_name(path) for path, count in missing.items() if count]:
        raise ResultError(f"the pieces of {incomplete[0]} in the checkpoint are not the whole tensor")
    return _walk(own, lambda path, value: given.get(path, value))


def _name(path: tuple[Any, ...]) -> str:
    return repr(".".join(map(str, path)))


def _walk(value: Any, visit: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Returns a copy of ``value``, made of plain dicts, lists and tuples, with each leaf replaced by ``visit``."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _walk(item, visit, (*path, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_walk(item, visit, (*path, index)) for index, item in enumerate(value))
    return visit(path, value)


def _tensors(state: Any) -> dict[tuple[Any, ...], Any]:
    """Returns the dense tensors, DTensors and shards of a nested state by their paths."""
    found: dict[tuple[Any, ...], Any] = {}

    def note(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, Shard) or is_sharded(value) or is_dense(value):
            found[path] = value

    _walk(state, note)
    return found
