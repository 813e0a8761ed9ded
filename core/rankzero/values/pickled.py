"""The file of a pickle, for arguments and for values that are neither plain data nor tensors in plain containers.

A file has a pickle and its large buffers: it is written without a copy in memory, and mapped where it is loaded.

    header    number of the parts, then the size of each, 8 bytes each
    parts     the pickle, then its out-of-band buffers (pickle protocol 5)

Header and parts begin at multiples of 64 bytes. Runs inside workers: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import operator
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rankzero.errors import ResultError
from rankzero.values import tensors
from rankzero.values.plain import canonical

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
            if tensors.is_sharded(obj) or hasattr(type(obj), "local_shards"):
                raise ResultError(
                    f"a value holds a {type(obj).__name__}, of which this rank has only its part: return "
                    "rankzero.train.full_state_dict(model), called on every rank, or report a state of DTensors"
                )
            if type_name(obj) == "torch.nn.parallel.distributed.DistributedDataParallel":
                # The model inside, since the other one needs a process group.
                return operator.getitem, ((obj.module,), 0)
            return tensors.reduce(obj) or super().reducer_override(obj)

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
