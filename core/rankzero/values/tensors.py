"""Pickles tensors as torch does, except that their memory is a separate buffer of the pickle.

By default, torch writes each storage as a file within the pickle: tensors that share one are not recognized, a view of
two elements copies all of it, and for newer types (float8, uint16) the result cannot be read. Here each piece of memory
is written once, and only as far as a tensor of the value uses it; tensors that shared memory share it when they are
loaded. Tensors on a GPU are loaded on the CPU.

Runs inside workers too: standard library and torch only.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WASTE = 64 << 10
"""Most bytes of a storage that are written although no tensor of the value uses them."""

Reduced = tuple[Any, ...]


class Tensors:
    """Reduces tensors and storages of one value for the pickler that writes it."""

    def __init__(self, root: object = None, rest: Callable[[Any], Any] = lambda _: NotImplemented) -> None:
        """Prepares for one value.

        Args:
            root: The value, in which the tensors that share memory are searched.
            rest: Reduces any object other than a tensor or storage as the value's pickler does.
        """
        self._root = root
        self._rest = rest
        self._recorder: _Recorder | None = None
        self._memories: dict[tuple[int, int, int], _Memory] = {}
        self._typed: dict[tuple[int, Any], _Typed] = {}

    def reduce(self, obj: Any) -> Reduced | None:
        """Reduces a tensor or storage for pickle's ``reducer_override``; returns None for any other object."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "UntypedStorage"):
            # torch is not imported, or is being imported.
            return None
        if isinstance(obj, torch.Tensor):
            if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "cuda", "meta"):
                obj = obj.cpu()
            function, arguments, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return (*self._with_memory(function, arguments), *rest)
        if isinstance(obj, torch.TypedStorage):
            return _itself, (self._place(obj._untyped_storage, 0, obj._untyped_storage.nbytes(), obj.dtype),)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return _itself, (self._memory(obj, 0, obj.nbytes()),)
        return None

    def _with_memory(self, function: Any, arguments: Reduced) -> Reduced:
        """Returns torch's reduction of a tensor, with a `_Memory` in place of the storage."""
        import torch

        utils = torch._utils
        if function is torch._tensor._rebuild_from_type_v2:
            inner, cls, inner_arguments, state = arguments
            inner, inner_arguments = self._with_memory(inner, inner_arguments)
            return function, (inner, cls, inner_arguments, state)
        if function is utils._rebuild_tensor_v3:
            # The function for newer types: like v2 but with an untyped storage, and it fails with requires_grad.
            storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = arguments
            rest: Reduced = (requires_grad, hooks, *metadata)
        elif arguments and isinstance(arguments[0], torch.TypedStorage):
            typed, offset, size, stride, *others = arguments
            storage, dtype, rest = typed._untyped_storage, typed.dtype, tuple(others)
        else:
            return function, arguments
        width, total = dtype.itemsize, storage.nbytes()
        low, high = offset * width, (offset + reach(size, stride)) * width
        if function is utils._rebuild_qtensor or high > total:
            low, high = 0, total
        place, begin = self._part(storage, low, high, dtype)
        function = utils._rebuild_tensor_v2 if function is utils._rebuild_tensor_v3 else function
        return function, (place, offset - begin // width, size, stride, *rest)

    def _part(self, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype) -> tuple[object, int]:
        """Returns the memory that contains some bytes of a storage, and the byte of the storage at which it begins."""
        total = storage.nbytes()
        if total - (high - low) >= WASTE:
            if self._recorder is None:
                self._recorder = _find_extents(self._root, self._rest)
            for begin, end in merged(self._recorder.found.get(storage._cdata, [])):
                if begin <= low and high <= end and begin % dtype.itemsize == 0:
                    low, high = begin, end
        if total - (high - low) < WASTE:
            low, high = 0, total
        return self._place(storage, low, high, dtype), low

    def _place(self, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype) -> object:
        memory = self._memory(storage, low, high)
        return self._typed.setdefault((id(memory), dtype), _Typed(memory, dtype))

    def _memory(self, storage: torch.UntypedStorage, low: int, high: int) -> _Memory:
        # One object for each piece, so that pickle writes it once.
        key = (storage._cdata, low, high)
        if key not in self._memories:
            self._memories[key] = _Memory(storage, low, high)
        return self._memories[key]


def reach(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns the number of elements from a tensor's first to its last in memory.

    Example:
        >>> reach((2, 3), (10, 1))
        13
    """
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


class _Memory:
    """A range of bytes of a storage, pickled as a buffer."""

    def __init__(self, storage: torch.UntypedStorage, low: int, high: int) -> None:
        self._storage, self._low, self._high = storage, low, high

    def __reduce__(self) -> Reduced:
        import ctypes

        size = self._high - self._low
        if not size:
            return make_storage, (b"",)
        here, start = self._storage, self._low
        if here.device.type != "cpu":
            import torch

            there = torch.empty(0, dtype=torch.uint8, device=here.device).set_(here)
            here, start = there[self._low : self._high].cpu().untyped_storage(), 0
        memory = (ctypes.c_char * size).from_address(here.data_ptr() + start)
        # Keeps the storage alive, even if the tensor is freed meanwhile.
        memory.owner = here  # type: ignore[attr-defined]
        return make_storage, (pickle.PickleBuffer(memory),)


class _Typed:
    """A range of bytes with an element type, from which torch creates a tensor."""

    def __init__(self, memory: _Memory, dtype: torch.dtype) -> None:
        self._memory, self._dtype = memory, dtype

    def __reduce__(self) -> Reduced:
        return make_typed, (self._memory, self._dtype)


def make_storage(buffer: Any) -> torch.UntypedStorage:
    """Creates the storage of a pickled tensor on the buffer's memory; it cannot be resized."""
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()


def make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Creates the typed storage that torch's functions for rebuilding tensors expect."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _itself(value: object) -> object:
    return value


def dump(pickler: Any, value: object) -> None:
    """Pickles a value with a pickler that reduces by its ``tensors``, and any other object by its method ``rest``."""
    pickler.tensors = Tensors(value, pickler.rest)
    try:
        pickler.dump(value)
    finally:
        # They refer to each other, and would keep the value's memory until the next collection of garbage.
        del pickler.tensors


# -- memory that tensors of a value share ----------------------------------------------------------


def _find_extents(root: object, rest: Callable[[Any], Any]) -> _Recorder:
    """Returns the ranges of memory that the tensors of a value use."""
    import cloudpickle

    recorder = _Recorder()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # A class refers to itself: it must not refer to the value.
        tensors: _Recorder
        rest: Callable[[Any], Any]

        def reducer_override(self, obj: Any) -> Any:
            return self.tensors.reduce(obj) or self.rest(obj)

    pickler = Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=lambda _: None)
    pickler.tensors, pickler.rest = recorder, rest
    pickler.dump(root)
    return recorder


class _Recorder(Tensors):
    """Records the ranges of memory that tensors use, without pickling them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, list[tuple[int, int]]] = {}
        """Ranges of bytes, by storage."""
        self._kept: list[object] = []

    def _part(self, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype) -> tuple[object, int]:
        return self._place(storage, low, high, dtype), low

    def _place(self, storage: torch.UntypedStorage, low: int, high: int, dtype: torch.dtype) -> object:
        self._memory(storage, low, high)
        return None

    def _memory(self, storage: torch.UntypedStorage, low: int, high: int) -> Any:
        self.found.setdefault(storage._cdata, []).append((low, high))
        # Keeps the storage alive, so that no other one gets its address.
        self._kept.append(storage)


class _Nowhere:
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that overlap, and sorts them.

    Example:
        >>> merged([(4, 6), (0, 2), (1, 3), (8, 8)])
        [(0, 3), (4, 6), (8, 8)]
    """
    found: list[tuple[int, int]] = []
    for low, high in sorted(extents):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found
