"""Tensors of a value: their memory is a buffer beside the pickle, and those that show all of it share it as before.

A view of a part is written with a memory of its own. Tensors of a GPU are loaded on the CPU. Runs inside workers too:
standard library and torch only.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values.plain import MAX_DEPTH, is_atom

if TYPE_CHECKING:
    import torch

_MAX_BITS = 2032
"""Most bits of an integer that ``torch.load(weights_only=True)`` reads."""

_NARROW = frozenset(f"int{bits}" for bits in range(1, 8))


def reach(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns the number of elements from a tensor's first to its last in memory.

    Example:
        >>> reach((2, 3), (10, 1))
        13
    """
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def compact(tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage] | None = None) -> torch.Tensor:
    """Returns a dense tensor that shows all of its memory: the given one, or a copy on the CPU if it shows a part.

    Args:
        tensor: The tensor.
        copies: Copies of storages by address, to which this call may add one. If given, a tensor that shows all of its
            memory is copied, too.

    Raises:
        ResultError: the tensor's memory was freed or made smaller.
    """
    import torch

    storage, width = tensor.untyped_storage(), tensor.element_size()
    begin = int(tensor.storage_offset()) * width
    length = reach(tensor.size(), tensor.stride()) * width
    if length and begin + length > storage.nbytes():
        # torch would resize the storage and read uninitialized memory.
        raise ResultError(
            f"a tensor with the shape {tuple(tensor.shape)} ends at byte {begin + length} of a storage of "
            f"{storage.nbytes()} bytes: its memory was freed or made smaller. Give a tensor that has its data"
        )
    is_whole = length == storage.nbytes()
    if is_whole and copies is None:
        return tensor
    copied = copies.get(storage._cdata) if is_whole and copies else None
    if copied is None:
        part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[begin : begin + length]
        copied = part.to("cpu", copy=True).untyped_storage()
    if is_whole and copies is not None:
        copies[storage._cdata] = copied
    viewed = view(tensor, copied, 0)
    if type(tensor) is torch.nn.Parameter:
        viewed = torch.nn.Parameter(viewed, tensor.requires_grad)
    viewed.requires_grad_(tensor.requires_grad).__dict__.update(tensor.__dict__)
    return viewed


def reduce(obj: Any) -> tuple[Any, ...] | None:
    """Reduces a tensor or storage, whose memory then is a buffer of the pickle; returns None for most others."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        # torch is not imported, or is being imported.
        return None
    if isinstance(obj, torch.TypedStorage):
        return make_typed, (obj._untyped_storage, obj.dtype)
    if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
        return make_storage, (pickle.PickleBuffer(_memory(obj.cpu())),)
    if type(obj) is not torch.Tensor or not is_dense(obj):
        return None
    function, arguments, *rest = compact(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    if function is torch._utils._rebuild_tensor_v3:
        # The function for newer types fails with requires_grad.
        storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = arguments
        typed = make_typed(storage, dtype)
        return torch._utils._rebuild_tensor_v2, (typed, offset, size, stride, requires_grad, hooks, *metadata)
    return function, arguments, *rest


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor with its data in one storage."""
    is_strided = str(tensor.layout) == "torch.strided" and not tensor.is_nested
    return is_strided and not tensor.is_quantized and tensor.device.type != "meta"


def is_narrow(dtype: torch.dtype) -> bool:
    """Returns True for integers of less than a byte, which torch can neither copy nor save."""
    return str(dtype).removeprefix("torch.").removeprefix("u") in _NARROW


def view(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: Any) -> torch.Tensor:
    """Returns a tensor like the given one, in a copy of its storage on the CPU, without requires_grad."""
    import torch

    viewed = torch.empty(0, dtype=tensor.dtype, device="cpu")
    viewed.set_(storage, offset, tensor.size(), tensor.stride())
    if tensor.is_conj():
        viewed = viewed.conj()
    return viewed._neg_view() if tensor.is_neg() else viewed


def _memory(storage: torch.UntypedStorage) -> memoryview:
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


# -- values that torch.load(weights_only=True) reads ----------------------------------------------


def tensors_in(value: object) -> list[torch.Tensor]:
    """Returns the tensors in a value that torch.load(weights_only=True) reads; none for any other value.

    Such a value has tensors in dicts, lists and tuples, beside strings, numbers, booleans and None.
    """
    torch: Any = sys.modules.get("torch")
    types: dict[int, torch.dtype] = {}
    found: list[torch.Tensor] = []
    level: list[Any] = [value] if hasattr(torch, "nn") else []
    seen: set[int] = set()
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if type(item) in (torch.Tensor, torch.nn.Parameter):
                if not _is_plain(item, types):
                    return []
                found.append(item)
            elif type(item) not in (dict, OrderedDict, list, tuple):
                if not is_atom(item) or (type(item) is int and item.bit_length() > _MAX_BITS):
                    return []
            elif id(item) not in seen:
                seen.add(id(item))
                below += item
                if isinstance(item, dict):
                    below += [*item.values(), *getattr(item, "__dict__", {}).values()]
        if not below:
            return found
        level = below
    return []


def _is_plain(tensor: torch.Tensor, types: dict[int, torch.dtype]) -> bool:
    """Returns True for a tensor that torch.save writes and reads; ``types`` has those seen before, by address."""
    if not is_dense(tensor) or is_narrow(tensor.dtype) or vars(tensor):
        return False
    if tensor.requires_grad and tensor.dtype.itemsize == 1 and type(tensor).__name__ == "Tensor":
        # torch's function for newer types fails.
        return False
    # torch.save refuses views of one memory with several types.
    return types.setdefault(tensor.untyped_storage().data_ptr() or -id(tensor), tensor.dtype) == tensor.dtype


def prepared(value: Any) -> Any:
    """Returns a copy of a value of `tensors_in` for torch.save, which then writes equal bytes for equal values.

    Tensors share memory with those of the value, unless they show a part of theirs. A pickle depends on which parts are
    one object: in the copy equal strings are one, and equal tuples of plain values are several.
    """
    import torch

    copies: dict[int, Any] = {}

    def copy(item: Any) -> Any:
        if type(item) is str:
            return sys.intern(item)
        if type(item) is tuple and all(map(is_atom, item)):
            return tuple(map(copy, item))
        if id(item) not in copies:
            # Containers are registered before they are filled, since they may contain themselves.
            if isinstance(item, torch.Tensor):
                copies[id(item)] = compact(item)
            elif type(item) is tuple:
                copies[id(item)] = tuple(map(copy, item))
            elif type(item) is list:
                copies[id(item)] = filled = list[Any]()
                filled += map(copy, item)
            elif isinstance(item, dict):
                copies[id(item)] = table = type(item)()
                table.update((copy(key), copy(each)) for key, each in item.items())
                if type(item) is OrderedDict:
                    table.__dict__.update(copy(vars(item)))
            else:
                return item
        return copies[id(item)]

    return copy(value)
