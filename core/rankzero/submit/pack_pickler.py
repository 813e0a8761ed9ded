"""Pickles a function and its arguments: user modules that ranks can import by name, all other user code by value."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _dynamic_class_reduce, _extract_code_globals, dynamic_subimport

from rankzero.submit.code_files import Needs
from rankzero.submit.code_modules import (
    forget_places,
    is_distributed,
    is_sent_by_name,
    is_sent_by_value,
    named_like,
    travels,
    wrapper_of,
)
from rankzero.submit.code_source import IMPORTERS, globals_of_classes, source_of_code
from rankzero.values import tensors

_OF_THE_DRIVER = ("DataFrame", "SparkSession", "SparkContext", "RDD")


class TrainingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what ranks get, and collects what it needs of the user's modules.

    Attributes:
        needs: What ranks import, and the texts in code by which it may reach further modules.
        by_value: Names in the pickle that are those of modules whose code it has.
        loaded: Modules below packages that code refers to, which this process has loaded and ranks import, too.
    """

    def __init__(
        self, on_buffer: Callable[[pickle.PickleBuffer], bool] | None = None, *, is_alone: bool = True
    ) -> None:
        self._stream = io.BytesIO()
        self._is_alone = is_alone
        super().__init__(self._stream, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self.needs = Needs()
        self.by_value: set[object] = set()
        self.loaded: list[str] = []

    def dumps(self, obj: object) -> bytes:
        """Pickles an object and collects what it needs of the user's modules."""
        forget_places()
        self.dump(obj)
        return self._stream.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object like cloudpickle, and collects the modules that it needs."""
        return tensors.reduce(obj) or self._reduce(obj)

    def _reduce(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return self._module(obj)
        if type(obj).__module__.startswith("pyspark.") and type(obj).__name__ in _OF_THE_DRIVER:
            raise pickle.PicklingError(
                f"ranks have no Spark, and so no {type(obj).__name__}: give a DataFrame as Launcher(dataset=df), and "
                "read it in the function with rankzero.train.get_dataset_shard()"
            )
        if type(obj).__module__ == "accelerate.state" and not self._is_alone:
            raise pickle.PicklingError(
                f"it holds accelerate's {type(obj).__name__}, the world of this process, and every rank would train "
                "alone in it: make TrainingArguments or Accelerator inside of the training function"
            )
        module = getattr(obj, "__module__", None)
        is_by_name = not isinstance(obj, (type, types.FunctionType)) or is_sent_by_name(obj)
        is_shipped = isinstance(module, str) and travels(module)
        if isinstance(obj, types.FunctionType):
            if is_shipped or not is_by_name:
                self._note_imports(obj)
            if is_shipped and (wrapper := wrapper_of(obj)):
                return getattr, (wrapper, "__wrapped__")
        if (reduced := reduce_wrapper(obj)) is not None:
            return reduced
        if is_shipped and named_like(obj, str(module)) is obj:
            self.needs.modules.add(str(module))
        if is_by_name:
            return super().reducer_override(obj)
        # Not by cloudpickle's own decision, which knows nothing of the user's modules, and searches every loaded module
        # for a function that names none, which takes milliseconds and triggers modules that load lazily.
        self.by_value.add(module)
        if isinstance(obj, type):
            return _dynamic_class_reduce(obj)
        self.by_value |= {obj.__globals__.get(name) for name in ("__name__", "__package__")}
        reduced = self._dynamic_function_reduce(obj)
        names = globals_of_classes(obj.__code__) & obj.__globals__.keys()
        reduced[2][1]["__globals__"] |= {name: obj.__globals__[name] for name in sorted(names)}
        return reduced

    def _module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if travels(name):
            self.needs.modules.add(name)
            self._note_loaded(name)
            return importlib.import_module, (name,)
        if is_sent_by_value(name):
            self.by_value |= {name, module.__package__}
            return dynamic_subimport, (name, {key: each for key, each in vars(module).items() if key != "__builtins__"})
        return NotImplemented

    def _note_imports(self, function: types.FunctionType) -> None:
        source = source_of_code(function.__code__, function.__globals__.get("__package__"))
        self.needs.add(source)
        used = [function.__globals__.get(name) for name in _extract_code_globals(function.__code__)]
        # Under whatever name it was imported.
        self.needs.computes |= any(isinstance(each, types.FunctionType) and each.__name__ in IMPORTERS for each in used)
        for name in {*source.imports, *(value.__name__ for value in used if isinstance(value, types.ModuleType))}:
            if travels(name):
                self._note_loaded(name)

    def _note_loaded(self, package: str) -> None:
        """Notes the modules below a package that this process has loaded: code reaches them by any attribute."""
        found = {name for name in list(sys.modules) if name.startswith(f"{package}.")}.difference(self.loaded)
        self.loaded += sorted(filter(travels, found))


_CACHED: Any = functools._lru_cache_wrapper


def reduce_wrapper(obj: Any) -> tuple[Any, ...] | None:
    """Reduces an object around a function that pickle cannot reduce, or would with what ranks must not get."""
    if is_distributed(obj) and not (travels(str(obj.__module__)) and named_like(obj, str(obj.__module__)) is obj):
        for_ranks: tuple[Any, ...] = obj.in_ranks()
        return for_ranks
    if isinstance(obj, functools.cached_property):
        # Before Python 3.12 it holds a lock.
        return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
    if isinstance(obj, _CACHED) and not is_sent_by_name(obj):
        # To the function that it wraps, with an empty cache.
        chosen = obj.cache_parameters()
        return _CACHED, (obj.__wrapped__, chosen["maxsize"], chosen["typed"], functools._CacheInfo), dict(vars(obj))
    return None
