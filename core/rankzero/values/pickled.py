"""The file of a pickle, for arguments and for values that are neither plain data nor tensors in plain containers.

A file has a pickle and its large buffers: it is written without a copy in memory, and mapped where it is loaded.

    header    number of the parts, then the size of each, 8 bytes each
    parts     the pickle, then its out-of-band buffers (pickle protocol 5)

Header and parts begin at multiples of 64 bytes. Tensors that show all of a memory share it as before; a view of a part
is written with its own. Tensors of a GPU are loaded on the CPU. Runs inside workers: standard library, torch and
cloudpickle only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import mmap
import operator
import pickle
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values.plain import canonical, consists_of, is_atom

if TYPE_CHECKING:
    import torch

LARGE = 64 << 10  # Bytes from which on a buffer is stored outside of the pickle
Part = bytes | memoryview

_ADVICE = "Return its state (a state_dict, numbers) instead, or load it where the code that wrote it can be imported"


def beside(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Returns a pickler's ``buffer_callback`` that moves large contiguous buffers from the pickle into ``buffers``."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        with contextlib.suppress(BufferError):
            view = buffer.raw()
            if view.nbytes >= LARGE:
                buffers.append(view)
                return False
        return True

    return take


def pack(pickled: Part, buffers: Sequence[memoryview]) -> list[Part]:
    """Returns the parts of the file in their order; the buffers are not copied."""
    sizes = [len(pickled), *map(len, buffers)]
    header = struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)
    parts: list[Part] = []
    for part in (header, pickled, *buffers):
        parts += [part, bytes(-len(part) % 64)]
    return parts


def open_packed(path: str | int, unpickler: Callable[..., pickle.Unpickler] = pickle.Unpickler) -> Any:
    """Loads a file that `pack` made, by its path or descriptor: large buffers are mapped, copy-on-write.

    The mapping remains valid if the file is deleted.
    """
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        return unpack(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)), unpickler)


def unpack(data: memoryview, unpickler: Callable[..., pickle.Unpickler]) -> Any:
    """Loads the content of a file that `pack` made; large buffers are parts of the given memory."""
    (count,) = struct.unpack_from("<Q", data)
    at, parts = 8 * (count + 1), []
    for size in struct.unpack_from(f"<{count}Q", data, 8):
        at += -at % 64
        parts.append(data[at : at + size])
        at += size
    return unpickler(io.BytesIO(parts[0]), buffers=parts[1:]).load()


@functools.cache
def _pickler() -> Any:
    """Returns the class of picklers for tensors, too, whose pickles of equal values are equal in every process."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if is_sharded(obj) or hasattr(type(obj), "local_shards"):
                raise ResultError(
                    f"a value holds a {type(obj).__name__}, of which this rank has only its part: return "
                    "rankzero.train.full_state_dict(model), called on every rank, or report a state of DTensors"
                )
            if type_name(obj) == "torch.nn.parallel.distributed.DistributedDataParallel":
                # The model inside, since the other one needs a process group.
                return operator.getitem, ((obj.module,), 0)
            return reduce_tensor(obj) or super().reducer_override(obj)

        def persistent_id(self, obj: Any) -> Any:
            known = self.__dict__.setdefault("known", {})
            if type(obj) is bytes:
                return known.setdefault(obj, obj)
            if type(obj) in (set, frozenset) and len(kinds := {type(item) for item in obj}) == 1 and kinds <= _ORDERED:
                return known.setdefault(id(obj), (obj, [type(obj), *sorted(obj)]))[1]
            other = canonical(obj)
            return other if other is not obj or type(obj) is str else None

    return Pickler


_ORDERED = {str, bytes, int, float}  # Types by which a set is sorted, since its own order differs between processes


class Loader(pickle.Unpickler):
    """An unpickler of `pickled`."""

    def persistent_load(self, pid: Any) -> Any:
        """Returns the string, tuple or set for which the pickle holds the given object."""
        sets = vars(self).setdefault("sets", {})
        return sets.setdefault(id(pid), (pid, pid[0](pid[1:])))[1] if type(pid) is list else pid


def pickled(value: object) -> list[Part]:
    """Returns the parts of a value's file; its large buffers are not copied. Equal values have equal files.

    Raises ResultError, which has its type, if it cannot be pickled or holds a part of a sharded tensor.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()
    with loading(f"a value of type {type_name(value)} cannot be pickled"):
        _pickler()(stream, pickle.HIGHEST_PROTOCOL, beside(buffers)).dump(value)
    return pack(stream.getbuffer(), buffers)


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turns errors of the block, except those of the disk and of memory, into `ResultError`; ``what`` failed."""
    try:
        yield
    except (OSError, MemoryError, ResultError):
        raise
    except Exception as error:
        raise ResultError(f"{what}: {type(error).__name__}: {error}. {_ADVICE}") from error


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module."""
    # A user's class may have set these to any object.
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# -- tensors --------------------------------------------------------------------------------------


def is_sharded(value: Any) -> bool:
    """Returns True for a DTensor, without importing its module."""
    return hasattr(type(value), "placements") and hasattr(type(value), "device_mesh")


def is_dense(value: Any) -> bool:
    """Returns True for a tensor with its data in one storage."""
    is_strided = str(getattr(value, "layout", None)) == "torch.strided" and not value.is_nested
    return is_strided and not value.is_quantized and value.device.type != "meta"


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the dense tensor, or a copy if it shows a part of its memory. Raises ResultError if that was freed."""
    # These return a tensor itself unless it is a conjugated or negated view.
    tensor = tensor.resolve_conj().resolve_neg()
    available = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (tensor.storage_offset() + last + 1) * tensor.element_size() > available:
        # torch would resize the storage and read uninitialized memory.
        raise ResultError(f"the memory of a tensor with the shape {tuple(tensor.shape)} was freed: give its data")
    if tensor.numel() * tensor.element_size() >= available:
        return tensor
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied.__dict__.update(tensor.__dict__)
    return copied


def reduce_tensor(obj: Any) -> tuple[Any, ...] | None:
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
    facts = whole.dtype, obj.requires_grad, vars(obj)
    return make_tensor, (whole.untyped_storage(), *facts, whole.storage_offset(), tuple(whole.shape), whole.stride())


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
    storage: torch.UntypedStorage, dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any], *form: Any
) -> torch.Tensor:
    """Creates a pickled tensor in its storage, of a form: offset, shape and strides."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *form)
    vars(tensor).update(attributes)
    return tensor.requires_grad_(requires_grad)


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
    # torch.save cannot write integers of less than a byte.
    if not is_dense(tensor) or re.fullmatch(r"torch\.u?int[1-7]", str(tensor.dtype)) or vars(tensor):
        return False
    if tensor.requires_grad and tensor.dtype.itemsize == 1 and type(tensor).__name__ == "Tensor":
        # torch's function for newer types fails.
        return False
    # torch.save refuses views of one memory with several types.
    return types.setdefault(tensor.untyped_storage().data_ptr() or -id(tensor), tensor.dtype) == tensor.dtype


class TorchPickle:
    """A module of pickle for ``torch.save``, which writes compact tensors, and equal bytes for equal values."""

    class Pickler(pickle._Pickler):
        """A pickler that pickles the compact or canonical object instead of a given one."""

        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            """Pickles one object, or the object that stands for it."""
            if type(obj) is sys.modules["torch"].Tensor:
                known = vars(self).setdefault("compact", {})
                obj = known.setdefault(id(obj), (obj, compact(obj)))[1]
            super().save(canonical(obj), save_persistent_id)  # type: ignore[misc]
