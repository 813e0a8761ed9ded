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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rankzero.errors import ResultError
from rankzero.values import tensors
from rankzero.values.plain import is_atom

LARGE = 64 << 10
"""Bytes from which on a buffer is stored outside of the pickle."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64

Part = bytes | memoryview

_INSTEAD = "Return its state (a state_dict, numbers) instead; metrics and logs of a run are kept"


def beside(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Returns a pickler's ``buffer_callback`` that moves large contiguous buffers from the pickle into ``buffers``."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:
            return True
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    return take


def pack(pickled: Part, buffers: Sequence[memoryview]) -> list[Part]:
    """Returns the parts of the file in their order; the buffers are not copied."""
    contents: list[Part] = [pickled, *buffers]
    sizes = [len(content) for content in contents]
    # The header's length depends on the offsets, and these on the header's length: it gets more room than it needs.
    room = _padded(_LENGTH.size + 48 * len(contents))
    places, offset = [], room
    for size in sizes:
        places.append([offset, size])
        offset += _padded(size)
    header = json.dumps(places).encode()
    parts: list[Part] = [(_LENGTH.pack(len(header)) + header).ljust(room, b"\0")]
    for content, size in zip(contents, sizes, strict=True):
        parts += [content, bytes(_padded(size) - size)]
    return parts


def open_packed(path: str | int, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
    """Loads a file that `pack` made: large buffers are mapped copy-on-write, and read when they are used.

    Args:
        path: The file, or the descriptor of an open one. The mapping remains valid if the file is deleted.
        unpickler: The class that loads the pickle.
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


def pickled(value: object) -> list[Part]:
    """Returns the parts of a value's file; its large buffers are not copied. Equal values have equal files.

    Raises:
        ResultError: the value cannot be pickled, or holds a part of a sharded tensor; the message has its type.
    """
    import cloudpickle

    # A class refers to itself: it must not refer to the value.
    kind = _type(value)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            return _canonical(obj, known)

        def reducer_override(self, obj: Any) -> Any:
            if hasattr(type(obj), "placements") and hasattr(type(obj), "device_mesh"):
                raise ResultError(
                    f"a value of type {kind} holds a DTensor, of which this rank has only its part: return "
                    "rankzero.train.full_state_dict(model), called on every rank, or give it to report(checkpoint=...)"
                )
            return tensors.reduce(obj) or saved(obj) or with_qualname(super().reducer_override(obj), obj)

    stream, buffers, known = io.BytesIO(), list[memoryview](), dict[Any, Any]()
    try:
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside(buffers)).dump(value)
        return pack(stream.getbuffer(), buffers)
    except (OSError, ResultError):
        raise
    except Exception as error:
        raise ResultError(f"a value of type {kind} cannot be pickled: {_why(error)}. {_INSTEAD}") from error


def _canonical(obj: Any, known: dict[Any, Any]) -> Any:
    """Returns the object that is pickled for one whose pickle differs between processes; None for any other.

    A pickle depends on which equal strings are one object, and on the order of a set. `Loader.persistent_load` returns
    the value of such an object.

    Args:
        obj: Any object.
        known: Equal bytes, and the sets with the lists that stand for them, by id.
    """
    kind = type(obj)
    if kind is str:
        return sys.intern(obj)
    if kind is bytes:
        return known.setdefault(obj, obj)
    if kind is tuple and all(map(is_atom, obj)):
        # Another tuple than the given one, which may be one constant in several places.
        return (*obj,)
    if kind in (set, frozenset) and len(kinds := {type(item) for item in obj}) == 1 and kinds <= _ORDERED:
        return known.setdefault(id(obj), (obj, [kind, *sorted(obj)]))[1]
    return None


_ORDERED = {str, bytes, int, float}
"""Types of items by which a set is sorted."""


def saved(obj: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns how an object of torch is loaded that pickle cannot save or load; None for any other object.

    torch saves TorchScript modules and exported programs by itself. Of a DistributedDataParallel model, which needs a
    process group, the model inside is saved.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        return operator.getitem, ((obj.module,), 0)
    if isinstance(obj, torch.jit.ScriptModule):
        save, load = torch.jit.save, torch.jit.load
    elif (export := sys.modules.get("torch.export")) and isinstance(obj, export.ExportedProgram):
        save, load = export.save, export.load
    else:
        return None
    stream = io.BytesIO()
    save(obj, stream)
    stream.seek(0)
    return load, (stream,)


@contextlib.contextmanager
def proving(value: object) -> Iterator[None]:
    """Runs a block that loads the written file of a value, to prove that it can be loaded.

    Raises:
        ResultError: the file cannot be loaded; the message has the value's type.
    """
    try:
        yield
    except Exception as error:
        raise ResultError(
            f"a value of type {_type(value)} was pickled, but cannot be read back: {_why(error)}. "
            f"{advice(error) or _INSTEAD}"
        ) from error


def advice(error: Exception) -> str:
    """Returns advice about an error during the loading of a value; empty if there is none."""
    if isinstance(error, ImportError):
        return (
            "Load it where the module can be imported (sys.path, an installed package), or return plain values or a "
            "state_dict, which need no module"
        )
    if isinstance(error, AttributeError) and "Can't get attribute" in str(error):
        return "The class or function was renamed, moved or removed since: load it with the code that wrote it"
    return ""


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "it is nested too deeply, or a chain of objects is too long; put its parts into a flat list"
    return f"{type(error).__name__}: {error}"


class Loader(pickle.Unpickler):
    """An unpickler that keeps this process's classes, instead of copies of those that were pickled by value.

    A class has an id of cloudpickle where it was pickled and where it was loaded from such a pickle. Elsewhere a class
    that was an attribute of its module where the job was submitted is known by its module and qualified name.
    """

    is_payload = False
    """True for the function and arguments of a rank. Values that the rank opens later have the classes of these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `pickle.Unpickler`."""
        super().__init__(*args, **kwargs)
        self._made: list[Any] = []
        self._sets: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Returns the string, tuple or set for which a value's pickle holds the given object."""
        if type(pid) is not list:
            return pid
        return self._sets.setdefault(id(pid), (pid, pid[0](pid[1:])))[1]

    def find_class(self, module: str, name: str) -> Any:
        """Finds a class like `pickle.Unpickler`; classes of this process take the place of cloudpickle's."""
        found = super().find_class(module, name)
        if not module.endswith("cloudpickle.cloudpickle"):
            return found
        if name == "_class_setstate":
            return lambda cls, state: found(cls, state) if any(cls is made for made in self._made) else cls
        return functools.partial(self._known_or_made, found, *_SKELETONS[name]) if name in _SKELETONS else found

    def _known_or_made(self, make: Callable[..., Any], id_at: int, module_of: Callable[..., str], *args: Any) -> Any:
        import cloudpickle.cloudpickle

        module, name = module_of(args), (args[id_at + 1] or {}).get(_NAME)
        known = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(args[id_at])
        if known is None and name:
            known = _class_in(module, name) or _of_payload.get((module, name))
        if known is None:
            self._made.append(known := make(*args))
            if name and self.is_payload:
                _of_payload[module, name] = known
        return known


_NAME = "__qualname__"

_of_payload: dict[tuple[str, str], Any] = {}
"""Classes that came with the function of this rank, by module and qualified name."""

_SKELETONS: dict[str, tuple[int, Callable[..., str]]] = {
    "_make_skeleton_class": (4, lambda args: args[3].get("__module__", "")),
    "_make_skeleton_enum": (5, operator.itemgetter(4)),
}
"""Functions of cloudpickle that create classes: the position of the class's id among their arguments, and its module.
Behind the id is a place for further facts, which cloudpickle leaves empty."""

_SCRIPTS = ("__main__", "__mp_main__")


class PayloadLoader(Loader):
    """A `Loader` for the function and arguments of a rank."""

    is_payload = True


def with_qualname(reduced: Any, cls: Any) -> Any:
    """Adds the qualified name of a module's class to how cloudpickle reduces the class by value, which leaves it out.

    Classes of scripts, which are all named ``__main__``, and those that a function makes are left as they are.

    Args:
        reduced: The value of cloudpickle's ``reducer_override``.
        cls: The object that was reduced, a class or any other.
    """
    if not (isinstance(cls, type) and isinstance(reduced, tuple) and cls.__module__ not in _SCRIPTS):
        return reduced
    if getattr(reduced[0], "__name__", "") not in _SKELETONS:
        return reduced
    names = (name for (_, name), known in _of_payload.items() if known is cls)
    name = cls.__qualname__ if _class_in(cls.__module__, cls.__qualname__) is cls else next(names, None)
    make, (*args, _), *rest = reduced
    return (make, (*args, {_NAME: name}), *rest) if name else reduced


def _class_in(module: str, name: str) -> type | None:
    """Returns a class by its qualified name in a module that has been imported here, else None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name) else None
