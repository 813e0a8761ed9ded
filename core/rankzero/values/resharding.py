"""Reads files of `rankzero.values.shards`: whole tensors, or the pieces that a rank of another world size needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rankzero.errors import ResultError
from rankzero.values import pickled
from rankzero.values.shards import LENGTH, Path, Stored, is_sharded, name_of, pieces_of, walk

if TYPE_CHECKING:
    import torch

_Bytes = TypeVar("_Bytes", bytes, bytearray)

_SHOWN = 5
"""Most names of tensors in one error."""

Copy = Callable[[Any, list[int], Any], None]


class ShardedState:
    """A sharded state, open for reading: the files that all ranks wrote."""

    def __init__(
        self,
        parts: Mapping[str, Mapping[str, Any]],
        open_part: Callable[[str], IO[bytes]],
        indexes: Mapping[str, bytes] | None = None,
    ) -> None:
        """Prepares the state without reading any file.

        Args:
            parts: By rank, as text: ``size`` and ``sha256``, as `write_to` returned them.
            open_part: Opens a rank's file.
            indexes: By rank, as text: the index of its file. Other indexes are read from their files.
        """
        self._parts = parts
        self._open_part = open_part
        self._given = indexes or {}
        self._indexes: dict[str, dict[str, Any]] = {}
        self._files: dict[str, _File] = {}

    def __enter__(self) -> ShardedState:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def load(self, rank: str) -> Any:
        """Returns the state with whole tensors, and other values as ``rank`` wrote them. Raises ResultError."""
        return walk(self._plain(rank), lambda _, value: self._whole(value) if isinstance(value, Stored) else value)

    def load_into(self, rank: str, target: Any) -> Any:
        """Fills the tensors of ``target`` and returns the state with them; see `fill`."""
        return fill(target, self._plain(rank), self._copy)

    def _plain(self, rank: str) -> Any:
        index = self._index(rank)
        rest = self._file(rank).read(index["rest"])
        try:
            return pickled.unpack(memoryview(rest), pickled.Loader)
        except Exception as error:
            do = pickled.advice(error) or "Give plain values and state dicts"
            what = f"{type(error).__name__}: {error}"
            raise ResultError(f"what rank {rank} wrote is whole, but cannot be loaded here: {what}. {do}") from error

    def _file(self, rank: str) -> _File:
        if rank not in self._files:
            part = self._parts[rank]
            self._files[rank] = _File(self._open_part(rank), part["size"])
        return self._files[rank]

    def _index(self, rank: str) -> dict[str, Any]:
        if rank not in self._indexes:
            sha256 = self._parts[rank]["sha256"]
            given = self._given.get(rank)
            found = self._file(rank).index(sha256) if given is None else _proved(given, sha256)
            self._indexes[rank] = json.loads(found)
        return self._indexes[rank]

    def _pieces(self, stored: Stored) -> list[tuple[str, dict[str, Any]]]:
        """Returns all pieces of a tensor, each with the rank that wrote it.

        Raises:
            ResultError: pieces are missing, or two ranks wrote different values for one piece.
        """
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for rank in self._parts:
            entry = self._index(rank)["tensors"].get(stored.name)
            for piece in entry["pieces"] if entry else ():
                other, known = found.setdefault(str([piece["offsets"], piece["sizes"]]), (rank, piece))
                if known["sha256"] != piece["sha256"]:
                    raise ResultError(
                        f"ranks {other} and {rank} wrote different values of {stored.name!r} into the checkpoint, as "
                        "pipeline stages do whose modules name their tensors alike: give each stage names of its own"
                    )
        if sum(prod(piece["sizes"]) for _, piece in found.values()) != prod(stored.shape):
            raise ResultError(f"the pieces of {stored.name!r} in the checkpoint are not the whole tensor")
        return list(found.values())

    def _whole(self, stored: Stored) -> torch.Tensor:
        import torch

        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self._copy(stored, [0] * len(stored.shape), whole)
        return whole

    def _copy(self, stored: Stored, offsets: list[int], local: torch.Tensor) -> None:
        """Fills a local tensor, which begins at ``offsets`` in the whole one."""
        dtype = stored.dtype
        for rank, piece in self._pieces(stored):
            if overlap(piece["offsets"], piece["sizes"], offsets, list(local.shape)) is not None:
                read = _tensor(self._file(rank).read(piece), dtype, piece["sizes"])
                copy_box(read, piece["offsets"], local, offsets)


class _File:
    """The open file of one rank, whose parts are verified when they are read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._size = size

    def index(self, sha256: str) -> bytearray:
        """Reads the index at the file's end. Raises ResultError if its checksum differs."""
        length = LENGTH.unpack(self._read(self._size - LENGTH.size, LENGTH.size))[0]
        if length > self._size - LENGTH.size:
            raise ResultError("a part of the checkpoint has no index", is_damage=True)
        return self.read({"at": self._size - LENGTH.size - length, "length": length, "sha256": sha256})

    def read(self, place: Mapping[str, Any]) -> bytearray:
        """Reads bytes at a place of the file. Raises ResultError if their checksum differs."""
        return _proved(self._read(place["at"], place["length"]), place["sha256"])

    def _read(self, at: int, length: int) -> bytearray:
        self._file.seek(at)
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ResultError("a part of the checkpoint is shorter than what was committed", is_damage=True)
            view = view[count:]
        return data

    def close(self) -> None:
        self._file.close()


def _proved(data: _Bytes, sha256: str) -> _Bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ResultError("a part of the checkpoint was changed or damaged after it was committed", is_damage=True)
    return data


def _tensor(data: bytearray, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(sizes)


# -- filling -------------------------------------------------------------------------------------


def fill(target: Any, state: Any, copy: Copy | None = None) -> Any:
    """Fills the tensors of ``target`` from a saved state, and returns that state with them.

    Args:
        target: The state of a model that trains now, with the same names.
        state: The saved state, with sharded tensors as `Stored`.
        copy: Fills a local tensor from a sharded one: called with the `Stored`, the offsets, and the local tensor.

    Raises:
        ResultError: a tensor of ``target`` was not saved, and nothing is filled; or a sharded tensor is not in
            ``target``, or has another shape.
    """
    tensors = {path: value for path, value in _leaves(target) if _is_tensor(value)}
    saved = {path for path, _ in _leaves(state)}
    if missing := [name_of(path) for path in tensors if path not in saved]:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        raise ResultError(
            f"the checkpoint lacks {len(missing)} of the {len(tensors)} tensors that are to be filled: {shown}. Give a "
            "state without them, or load() what there is"
        )
    skipped: set[Any] = set()

    def place(path: Path, value: Any) -> Any:
        found = tensors.get(path)
        if found is not None and (isinstance(value, Stored) or _is_tensor(value)):
            _fill_tensor(name_of(path), found, value, copy)
            return found
        if isinstance(value, Stored):
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

    shape = source.shape if isinstance(source, Stored) else list(source.shape)
    if shape != list(target.size()):
        raise ResultError(
            f"{name!r} has the shape {shape} in the checkpoint, and {list(target.size())} in the state to be filled"
        )
    pieces = pieces_of(target).pieces if is_sharded(target) else [([0] * len(shape), target)]
    with torch.no_grad():
        for offsets, local in pieces:
            if isinstance(source, Stored):
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
    """Returns the intersection of two boxes as begin and end in each dimension; None if it is empty."""
    shared = [
        (max(a, b), min(a + length, b + other))
        for a, length, b, other in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    ]
    return shared if all(begin < end for begin, end in shared) else None


def copy_box(source: torch.Tensor, source_offsets: list[int], target: torch.Tensor, target_offsets: list[int]) -> None:
    """Copies the overlap of two pieces of one tensor."""
    shared = overlap(source_offsets, list(source.shape), target_offsets, list(target.shape))
    if shared is None:
        return
    for dim, (begin, end) in enumerate(shared):
        source = source.narrow(dim, begin - source_offsets[dim], end - begin)
        target = target.narrow(dim, begin - target_offsets[dim], end - begin)
    target.copy_(source)
