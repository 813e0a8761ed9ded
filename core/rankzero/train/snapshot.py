"""Copies a checkpoint's state in memory, so that training can change the state while the copy is written to a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values import formats, pickled, sharded
from rankzero.values import tensors as tensors_of
from rankzero.values.digest import Writable

if TYPE_CHECKING:
    import torch


def take(state: dict[Any, Any]) -> tuple[Any, bool]:
    """Returns a copy of a state with all tensors on the CPU; those that show all of a memory share it in the copy, too.

    Args:
        state: Tensors and picklable values.

    Returns:
        The copy, and whether it contains sharded tensors.

    Raises:
        ResultError: a value in the state cannot be pickled or unpickled.
    """
    import cloudpickle
    import torch

    tensors: list[Any] = []
    numbers: dict[int, int] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> int | None:
            if not (isinstance(obj, torch.Tensor) or hasattr(obj, "local_shards")):
                return None
            if torch.nn.parameter.is_lazy(obj):
                # A lazy parameter has no data yet and can be pickled without.
                return None
            if id(obj) not in numbers:
                numbers[id(obj)] = len(tensors)
                tensors.append(obj)
            return numbers[id(obj)]

        def reducer_override(self, obj: Any) -> Any:
            # Handles storages outside of tensors, and tensors without data.
            return tensors_of.reduce(obj) or pickled.saved(obj) or super().reducer_override(obj)

    class Unpickler(pickled.Loader):
        def persistent_load(self, number: Any) -> Any:
            return copies[number]

    rest, buffers = io.BytesIO(), []
    try:
        pickler = Pickler(rest, protocol=5, buffer_callback=lambda buffer: buffers.append(bytearray(buffer.raw())))
        pickler.dump(state)
        storages: dict[int, torch.UntypedStorage] = {}
        copies = [_copy(tensor, storages) for tensor in tensors]
        rest.seek(0)
        return Unpickler(rest, buffers=buffers).load(), any(map(sharded.is_sharded, copies))
    except (OSError, ResultError, MemoryError):
        raise
    except Exception as error:
        raise ResultError(
            f"a checkpoint cannot be pickled: {type(error).__name__}: {error}. Give plain values and state dicts"
        ) from error


def write_to(state: Any, file_format: str, file: Writable) -> dict[str, Any]:
    """Writes a copy that `take` has made into a file, and returns the facts about the file."""
    if file_format != formats.SHARDS:
        size, sha256 = formats.write_to(state, file_format, file)
        return {"size": size, "sha256": sha256}
    return sharded.write_to(state, file)


def _copy(tensor: Any, copies: dict[int, torch.UntypedStorage]) -> Any:
    import torch

    if sharded.is_sharded(tensor):
        return sharded.copy_of(tensor)
    if is_plain(tensor):
        copied = tensors_of.compact(tensor, copies)
    elif tensor.device.type == "meta":
        copied = tensor
    else:
        copied = tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
        copied.__dict__.update(tensor.__dict__)
    if type(tensor) is torch.nn.Parameter and type(copied) is not torch.nn.Parameter:
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def is_plain(tensor: Any) -> bool:
    """Returns True for a dense tensor, or parameter, of torch's own type with its data in one storage."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensors_of.is_dense(tensor)
