"""Copies a checkpoint's state in memory, so that training can change the state while the copy is written to a file."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.train import sharded
from rankzero.values import formats, pickled
from rankzero.values import tensors as tensors_of
from rankzero.values.digest import Writable
from rankzero.values.tensors import is_dense, is_narrow, reach, view

if TYPE_CHECKING:
    import torch


def take(state: dict[Any, Any]) -> tuple[Any, bool]:
    """Returns a copy of a state with all tensors on the CPU; tensors that share storage still share it in the copy.

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
        copies = _copy_all(tensors)
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


def _copy_all(tensors: list[Any]) -> list[Any]:
    import torch

    plain = [tensor for tensor in tensors if is_plain(tensor)]
    uses = Counter(_storage(tensor) for tensor in plain)
    longest: dict[Any, torch.UntypedStorage] = {}
    for tensor in plain:
        # Tensors made from arrays at one address have separate storages of different lengths.
        storage = tensor.untyped_storage()
        longest[_storage(tensor)] = max(longest.get(_storage(tensor), storage), storage, key=lambda each: each.nbytes())
    copied_storages: dict[Any, torch.UntypedStorage] = {}

    def viewed(tensor: Any) -> Any:
        key = _storage(tensor)
        if key not in copied_storages:
            copied_storages[key] = _copy_storage(longest[key])
        return _view(tensor, copied_storages[key])

    def copy(tensor: Any) -> Any:
        if sharded.is_sharded(tensor):
            return sharded.copy_of(tensor)
        if is_plain(tensor) and (uses[_storage(tensor)] > 1 or _is_larger_than_its_storage(tensor)):
            copied = viewed(tensor)
        else:
            copied = _copy(tensor)
        if type(tensor) is torch.nn.Parameter:
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        copied.__dict__.update(tensor.__dict__)
        return copied

    return [copy(tensor) for tensor in tensors]


def is_plain(tensor: Any) -> bool:
    """Returns True for a dense tensor, or parameter, of torch's own type with its data in one storage."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_dense(tensor)


def _is_larger_than_its_storage(tensor: torch.Tensor) -> bool:
    """Returns True for an expanded tensor, whose copy would take more memory than its storage."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return tensor
    if is_plain(tensor) and is_narrow(tensor.dtype):
        return _view(tensor, _copy_storage(tensor.untyped_storage()))
    return tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg()


def _copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    import torch

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.to("cpu", copy=True).untyped_storage()


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor like the given one, in a copy of its storage."""
    end = (tensor.storage_offset() + reach(tensor.size(), tensor.stride())) * tensor.element_size()
    if tensor.numel() and end > storage.nbytes():
        # torch would resize the storage and read uninitialized memory.
        raise ResultError(
            f"a tensor of a checkpoint with the shape {tuple(tensor.shape)} ends at byte {end} of a storage of "
            f"{storage.nbytes()} bytes: its memory was freed or made smaller. Give a tensor that has its data"
        )
    return view(tensor, storage, tensor.storage_offset())
