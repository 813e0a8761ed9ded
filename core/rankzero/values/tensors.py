"""Tensors in files: those that show all of a memory share it as before, a view of a part is written with its own.

Tensors of a GPU are loaded on the CPU. Runs inside workers too: standard library and torch only.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values.plain import canonical, consists_of, is_atom

if TYPE_CHECKING:
    import torch

_NARROW = frozenset(f"int{bits}" for bits in range(1, 8))


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor with its data in one storage."""
    is_strided = str(tensor.layout) == "torch.strided" and not tensor.is_nested
    return is_strided and not tensor.is_quantized and tensor.device.type != "meta"


def is_narrow(dtype: torch.dtype) -> bool:
    """Returns True for integers of less than a byte, which torch can neither copy nor save."""
    return str(dtype).removeprefix("torch.").removeprefix("u") in _NARROW


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor that shows all of its memory: the given one, or a copy if it shows a part.

    Raises:
        ResultError: the tensor's memory was freed or made smaller.
    """
    import torch

    storage, width = tensor.untyped_storage(), tensor.element_size()
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    length = (1 + sum((size - 1) * step for size, step in steps)) * width if tensor.numel() else 0
    begin = int(tensor.storage_offset()) * width
    if length and begin + length > storage.nbytes():
        raise ResultError(
            f"a tensor with the shape {tuple(tensor.shape)} ends at byte {begin + length} of a storage of "
            f"{storage.nbytes()} bytes: its memory was freed or made smaller. Give a tensor that has its data"
        )
    if length == storage.nbytes():
        return tensor
    part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[begin : begin + length].clone()
    copied = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    copied.set_(part.untyped_storage(), 0, tensor.size(), tensor.stride())
    copied = copied.conj() if tensor.is_conj() else copied
    copied = copied._neg_view() if tensor.is_neg() else copied
    copied.requires_grad_(tensor.requires_grad).__dict__.update(tensor.__dict__)
    return copied


def reduce(obj: Any) -> tuple[Any, ...] | None:
    """Reduces a tensor or storage, whose memory then is a buffer of the pickle; returns None for most others."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        # torch is not imported, or is being imported.
        return None
    if isinstance(obj, torch.TypedStorage):
        return make_typed, (obj._untyped_storage, obj.dtype)
    if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
        return make_storage, (pickle.PickleBuffer(memory_of(obj.cpu())),)
    if type(obj) is not torch.Tensor or not is_dense(obj):
        return None
    whole = compact(obj)
    signs = whole.is_conj(), whole.is_neg()
    form = whole.dtype, tuple(whole.shape), whole.stride(), signs, obj.requires_grad
    return make_tensor, (whole.untyped_storage(), *form, vars(obj))


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Returns the memory of a storage on the CPU, which keeps the storage alive."""
    if not storage.nbytes():
        return memoryview(b"")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def make_storage(buffer: Any) -> torch.UntypedStorage:
    """Creates the storage of a pickled tensor on the buffer's memory; it cannot be resized."""
    import torch

    memory = memoryview(buffer)
    if not memory.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8).untyped_storage()


def make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Creates the typed storage that torch's functions for rebuilding tensors expect."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def make_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    signs: tuple[bool, bool],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    """Creates a pickled tensor in its storage."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, size, stride)
    tensor = tensor.conj() if signs[0] else tensor
    tensor = tensor._neg_view() if signs[1] else tensor
    vars(tensor).update(attributes)
    return tensor.requires_grad_(requires_grad)


# -- files of torch.save --------------------------------------------------------------------------


def is_all_tensors(value: object) -> bool:
    """Returns True for dense tensors in dicts, lists and tuples, beside strings, numbers, booleans and None."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "nn"):
        return False
    types: dict[int, torch.dtype] = {}

    def is_part(item: Any) -> bool:
        return _is_plain(item, types) if type(item) in (torch.Tensor, torch.nn.Parameter) else is_atom(item)

    return consists_of(value, (dict, OrderedDict, list, tuple), is_part, is_atom) and bool(types)


def _is_plain(tensor: torch.Tensor, types: dict[int, torch.dtype]) -> bool:
    """Returns True for a tensor that torch.save writes and reads; ``types`` has those seen before, by address."""
    if not is_dense(tensor) or is_narrow(tensor.dtype) or vars(tensor):
        return False
    if tensor.requires_grad and tensor.dtype.itemsize == 1 and type(tensor).__name__ == "Tensor":
        # torch's function for newer types fails.
        return False
    # torch.save refuses views of one memory with several types.
    return types.setdefault(tensor.untyped_storage().data_ptr() or -id(tensor), tensor.dtype) == tensor.dtype


class TorchPickle:
    """A module of pickle for ``torch.save``, which writes compact tensors, and equal bytes for equal values."""

    class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
        """A pickler that pickles the compact or canonical object instead of a given one."""

        def __init__(self, *args: Any, **options: Any) -> None:
            """Takes the arguments of `pickle.Pickler`."""
            super().__init__(*args, **options)
            self._compact: dict[int, tuple[Any, Any]] = {}

        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            """Pickles one object."""
            if type(obj) is sys.modules["torch"].Tensor:
                obj = self._compact.setdefault(id(obj), (obj, compact(obj)))[1]
            super().save(canonical(obj), save_persistent_id)
