"""The cloudpickle format, for values that are neither plain data nor a dict of tensors; large buffers are separate.

Runs inside workers too: standard library, torch and cloudpickle only.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from rankzero.errors import ResultError
from rankzero.values.envelope import Part, beside, open_packed, pack
from rankzero.values.tensors import Tensors

_INSTEAD = "Return its state (a state_dict, numbers) instead; metrics and logs of a run are kept"


def pickled(value: object) -> Sequence[Part]:
    """Returns the parts of a value's file; its large buffers are not copied.

    Raises:
        ResultError: the value cannot be pickled, or holds a part of a sharded tensor; the message has its type.
    """
    import cloudpickle

    tensors = Tensors(value)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if hasattr(type(obj), "placements") and hasattr(type(obj), "device_mesh"):
                raise ResultError(
                    f"a value of type {_type(value)} holds a DTensor, of which this rank has only its part: return "
                    "rankzero.train.full_state_dict(model), called on every rank, or give it to report(checkpoint=...)"
                )
            return tensors.reduce(obj) or saved(obj) or super().reducer_override(obj)

    stream = io.BytesIO()
    buffers: list[memoryview] = []
    try:
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside(buffers)).dump(value)
    except (OSError, ResultError):
        raise
    except Exception as error:
        raise ResultError(f"a value of type {_type(value)} cannot be pickled: {_why(error)}. {_INSTEAD}") from error
    return pack(stream.getbuffer(), buffers)


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


def prove(file: IO[bytes], value: object) -> None:
    """Loads the written file of a value like its readers, to prove that it can be loaded.

    Raises:
        ResultError: the file cannot be loaded; the message has the value's type.
    """
    try:
        open_packed(file.fileno(), Loader)
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

    A class has an id of cloudpickle where it was pickled and where it was loaded from such a pickle. Elsewhere it is
    known by its module and name if exactly one such class is here. Classes of scripts are not, since all scripts are
    named ``__main__``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `pickle.Unpickler`."""
        super().__init__(*args, **kwargs)
        self._made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Finds a class like `pickle.Unpickler`; classes of this process take the place of cloudpickle's."""
        found = super().find_class(module, name)
        if not module.endswith("cloudpickle.cloudpickle"):
            return found
        if name == "_class_setstate":
            return lambda cls, state: found(cls, state) if any(cls is made for made in self._made) else cls
        return functools.partial(self._known_or_made, found, *_SKELETONS[name]) if name in _SKELETONS else found

    def _known_or_made(self, make: Callable[..., Any], id_at: int, module_of: Callable[..., str], *args: Any) -> Any:
        module, name = module_of(args), args[1]
        known = _tracked().get(args[id_at])
        if known is None and module not in _SCRIPTS:
            loaded = {id(cls): cls for cls in (*_classes_in(module), *_tracked().values())}
            same = [cls for cls in loaded.values() if (cls.__module__, cls.__name__) == (module, name)]
            known = same[0] if len(same) == 1 else None
        if known is None:
            self._made.append(known := make(*args))
        return known


_SKELETONS: dict[str, tuple[int, Callable[..., str]]] = {
    "_make_skeleton_class": (4, lambda args: args[3].get("__module__", "")),
    "_make_skeleton_enum": (5, operator.itemgetter(4)),
}
"""Functions of cloudpickle that create classes: the position of the class's id among their arguments, and its module.
The name is the second argument."""

_SCRIPTS = ("", "__main__", "__mp_main__")


def _tracked() -> Mapping[str, type]:
    """Returns the classes of this process that have an id of cloudpickle."""
    import cloudpickle.cloudpickle

    return getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})


def _classes_in(module: str) -> Iterator[type]:
    """Yields the classes that a loaded module defines, with the nested ones; none if it is not loaded."""
    waiting: list[object] = [sys.modules.get(module)]
    while waiting:
        for value in list(getattr(waiting.pop(), "__dict__", {}).values()):
            if isinstance(value, type) and value.__module__ == module:
                yield value
                waiting.append(value)
