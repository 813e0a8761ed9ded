"""Copies a checkpoint's state in memory, so that training can change the state while the copy is written to a file."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

from rankzero.errors import ResultError
from rankzero.values import formats, pickled, sharded
from rankzero.values.digest import Writable
from rankzero.values.tensors import is_dense


def take(state: dict[Any, Any]) -> tuple[Any, bool]:
    """Returns a copy of a state with all tensors on the CPU; those that show all of a memory share it in the copy, too.

    Args:
        state: Tensors and picklable values.

    Returns:
        The copy, and whether it contains sharded tensors.

    Raises:
        ResultError: a value in the state cannot be pickled or unpickled.
    """
    copies: dict[int, Any] = {}

    class Pickler(pickled.pickler()):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> int | None:
            if not sharded.is_sharded(obj):
                return None
            if id(obj) not in copies:
                copies[id(obj)] = _copy(obj)
            return id(obj)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Any:
            return copies[number]

    rest, buffers = io.BytesIO(), list[bytearray]()
    with pickled.loading("a checkpoint cannot be pickled"):
        Pickler(rest, 5, lambda buffer: buffers.append(bytearray(buffer.raw()))).dump(state)
        rest.seek(0)
        taken = Unpickler(rest, buffers=buffers).load(), bool(copies)
        # A class refers to itself, and its function to these.
        copies.clear()
        return taken


def write_to(state: Any, file_format: str, file: Writable) -> dict[str, Any]:
    """Writes a copy that `take` has made into a file, and returns the facts about the file."""
    if file_format != formats.SHARDS:
        size, sha256 = formats.write_to(state, file_format, file)
        return {"size": size, "sha256": sha256}
    return sharded.write_to(state, file)


def _copy(tensor: Any) -> Any:
    if hasattr(tensor, "local_shards"):
        return copy.deepcopy(tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ResultError(f"a DTensor with the placements {tensor.placements} cannot be saved: redistribute() it first")
    return tensor.detach().to("cpu", copy=True)


def is_plain(tensor: Any) -> bool:
    """Returns True for a dense tensor, or parameter, of torch's own type with its data in one storage."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_dense(tensor)
