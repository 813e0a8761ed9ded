"""The file of a pickle, for arguments and for values that are neither plain data nor tensors in plain containers.

A file has a pickle and its large buffers: it is written without a copy in memory, and mapped where it is loaded.

    8 bytes   length of the header
    header    JSON: offset and size of the pickle, then of each of its out-of-band buffers (pickle protocol 5)
    content   each part at a multiple of 64 bytes

Runs inside workers too: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import mmap
import operator
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rankzero.errors import ResultError
from rankzero.values import tensors
from rankzero.values.plain import canonical

LARGE = 64 << 10
"""Bytes from which on a buffer is stored outside of the pickle."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64

Part = bytes | memoryview

_INSTEAD = "Return its state (a state_dict, numbers) instead; metrics and logs of a run are kept"


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
    contents: list[Part] = [pickled, *buffers]
    # The header's length depends on the offsets, and these on the header's length: it gets more room than it needs.
    room = _padded(_LENGTH.size + 48 * len(contents))
    places, offset = [], room
    for content in contents:
        places.append([offset, len(content)])
        offset += _padded(len(content))
    header = json.dumps(places).encode()
    parts: list[Part] = [(_LENGTH.pack(len(header)) + header).ljust(room, b"\0")]
    for content in contents:
        parts += [content, bytes(_padded(len(content)) - len(content))]
    return parts


def open_packed(path: str | int, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
    """Loads a file that `pack` made, by its path or descriptor: large buffers are mapped, copy-on-write.

    The mapping remains valid if the file is deleted.
    """
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        return unpack(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)), unpickler)


def unpack(data: memoryview, unpickler: type[pickle.Unpickler]) -> Any:
    """Loads the content of a file that `pack` made; large buffers are parts of the given memory."""
    (length,) = _LENGTH.unpack_from(data)
    places = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    pickled, *buffers = (data[offset : offset + size] for offset, size in places)
    return unpickler(io.BytesIO(pickled), buffers=buffers).load()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def pickler() -> Any:
    """Returns cloudpickle's class of picklers with rankzero's ways for tensors and for models of torch."""
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
            return tensors.reduce(obj) or with_qualname(super().reducer_override(obj), obj)

    return Pickler


_of_payload: dict[tuple[str, str], Any] = {}
"""Classes that came by value with this process's function, by module and qualified name."""

_names = weakref.WeakKeyDictionary[Any, str]()
"""Qualified names of all classes that came by value."""

_unset: list[Any] = []
"""Those that have no attributes yet."""


def with_qualname(reduced: Any, cls: Any) -> Any:
    """Has a class that is pickled by value loaded as that of its module, where the module has been imported.

    Other processes make one copy of it. Classes that a function makes, and those of scripts, are left as they are.

    Args:
        reduced: The value of cloudpickle's ``reducer_override``.
        cls: The object that was reduced, a class or any other.
    """
    if not (isinstance(cls, type) and isinstance(reduced, tuple) and len(reduced) == 6):
        return reduced
    name = cls.__qualname__ if _class_in(cls.__module__, cls.__qualname__) is cls else _names.get(cls)
    if name is None or cls.__module__ in ("__main__", "__mp_main__"):
        return reduced
    return make_class, (cls.__module__, name, *reduced[:2]), reduced[2], None, None, set_class


def make_class(
    module: str, name: str, make: Callable[..., Any], args: tuple[Any, ...], made: dict[Any, Any] = _of_payload
) -> Any:
    """Returns the class of that module and qualified name, which is made if neither process nor ``made`` has one."""
    found = _class_in(module, name) or _of_payload.get((module, name)) or made.get((module, name))
    if found is None:
        found = made[module, name] = make(*args)
        _names[found] = name
        _unset.append(found)
    return found


def set_class(cls: Any, state: Any) -> None:
    """Sets the attributes of a class that `make_class` has made."""
    from cloudpickle.cloudpickle import _class_setstate

    if any(cls is each for each in _unset):
        _unset[:] = [each for each in _unset if each is not cls]
        _class_setstate(cls, state)


def _class_in(module: str, name: str) -> type | None:
    """Returns a class by its qualified name in a module that has been imported here, else None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name) else None


@functools.cache
def _canonical_pickler() -> Any:
    """Returns the class of picklers whose pickles of equal values are equal in every process."""

    class Pickler(pickler()):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            known = self.__dict__.setdefault("known", {})
            if type(obj) is bytes:
                return known.setdefault(obj, obj)
            if type(obj) in (set, frozenset) and len(kinds := {type(item) for item in obj}) == 1 and kinds <= _ORDERED:
                return known.setdefault(id(obj), (obj, [type(obj), *sorted(obj)]))[1]
            other = canonical(obj)
            return other if other is not obj or type(obj) is str else None

    return Pickler


_ORDERED = {str, bytes, int, float}
"""Types of items by which a set is sorted, since its own order differs between processes."""


class Loader(pickle.Unpickler):
    """An unpickler of `pickled`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `pickle.Unpickler`."""
        super().__init__(*args, **options)
        self._sets: dict[int, Any] = {}
        self._made: dict[Any, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Finds a class or function. Classes by value are this file's own: another may have other versions of them."""
        found = super().find_class(module, name)
        return functools.partial(make_class, made=self._made) if found is make_class else found

    def persistent_load(self, pid: Any) -> Any:
        """Returns the string, tuple or set for which the pickle holds the given object."""
        return self._sets.setdefault(id(pid), (pid, pid[0](pid[1:])))[1] if type(pid) is list else pid


def pickled(value: object) -> list[Part]:
    """Returns the parts of a value's file; its large buffers are not copied. Equal values have equal files.

    Raises:
        ResultError: the value cannot be pickled, or holds a part of a sharded tensor; the message has its type.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()
    try:
        _canonical_pickler()(stream, pickle.HIGHEST_PROTOCOL, beside(buffers)).dump(value)
        return pack(stream.getbuffer(), buffers)
    except (OSError, ResultError):
        raise
    except Exception as error:
        raise ResultError(f"a value of type {type_name(value)} cannot be pickled: {_why(error)}. {_INSTEAD}") from error


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Turns the errors of a block that loads a value into `ResultError`, except those of the disk and of memory.

    Its message begins with ``what``, and has the reason and advice.
    """
    try:
        yield
    except (OSError, MemoryError, ResultError):
        raise
    except Exception as error:
        do = _INSTEAD
        if isinstance(error, ImportError):
            do = (
                "Load it where the module can be imported (sys.path, an installed package), or return plain values or "
                "a state_dict, which need no module"
            )
        elif isinstance(error, AttributeError) and "Can't get attribute" in str(error):
            do = "The class or function was renamed, moved or removed since: load it with the code that wrote it"
        raise ResultError(f"{what}: {_why(error)}. {do}") from error


def reading_back(value: object) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which a written value is loaded, to prove that it can be."""
    return loading(f"a value of type {type_name(value)} was written, but cannot be read back")


def type_name(value: object) -> str:
    """Returns the name of a value's type, with its module."""
    # A user's class may have set these to any object.
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "it is nested too deeply, or a chain of objects is too long; put its parts into a flat list"
    return f"{type(error).__name__}: {error}"
