"""Packs a function or script, its arguments and the user's modules that they need into bytes.

The user's own modules (all that are not installed) need not exist where the ranks run:

* a module that can be imported by its name is shipped as source in ``modules.zip``, with the modules
  it imports in turn; its functions and classes are pickled by reference, so that each exists once;
* ``__main__``, notebooks, DAG files under synthetic names, and modules that import an orchestrator,
  which executors do not have, are pickled by value, as far as the function refers to them.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from rankzero.errors import InvalidJobError
from rankzero.host.processes import fork_safe
from rankzero.submit.imports import globals_of_classes, imports_of_code, loaded_below, submodules_of_code
from rankzero.submit.modules import (
    forget_places,
    is_made_by_hand,
    is_user_module,
    is_user_module_name,
    travels_as_source,
)
from rankzero.submit.params import named_arguments
from rankzero.submit.shipping import Shipped, zip_modules
from rankzero.submit.training import Command, Module, Script, check_callable, name_of, resolve
from rankzero.values import tensors
from rankzero.values.pickled import Part, beside, pack, with_qualname
from rankzero.values.ref import ResultRef, map_refs

# cloudpickle's registry of by-value modules is global to the process.
_REGISTRY_LOCK = fork_safe(threading.RLock())


@dataclass(frozen=True)
class Payload:
    """The function or script, arguments and modules that are sent to the workers.

    Attributes:
        name: Display name of the function or script.
        data: The pickle of function or script and arguments, made by `rankzero.values.pickled.pack`.
        modules: The user modules that are shipped with it, or None.
        refs: The `ResultRef` objects among the arguments and in a trainer's configuration.
    """

    name: str
    data: list[Part]
    modules: Shipped | None = None
    refs: list[ResultRef] = field(default_factory=list)


def build(
    train: object, args: tuple[Any, ...], kwargs: dict[str, Any], restart_on: object = (), *, is_alone: bool = False
) -> Payload:
    """Builds the payload of a training.

    Args:
        train: As for `rankzero.submit.training.resolve`. The ``launch_config`` of a compatibility layer's trainer is a
            dict that counts as an argument: `ResultRef` objects in it are opened, too.
        args: Positional arguments. `ResultRef` objects in them, also nested, are opened in the workers.
        kwargs: Keyword arguments; only a function accepts them.
        restart_on: As for `Launcher`; a rank that fails loads it.
        is_alone: True for a run of one rank, whose objects may depend on a world of one process.

    Raises:
        InvalidJobError: ``train`` cannot be run, the arguments do not fit its signature,
            or an object cannot be pickled; the message names it.
    """
    refs: list[ResultRef] = []
    map_refs([list(args), dict(kwargs), getattr(train, "launch_config", None)], refs.append)
    training = resolve(train)
    extra, needed = _pickle_restart_on(restart_on)
    if isinstance(training, (Script, Module, Command)):
        return _build_program(training, args, kwargs, extra, needed, refs)
    check_callable(training, args, kwargs)
    name = name_of(training)
    parts = {"kind": "function", "name": name, "function": training, "args": args, "kwargs": kwargs}
    make_pickler = functools.partial(TrainingPickler, is_alone=is_alone)
    buffer = io.BytesIO()
    buffers: list[memoryview] = []
    pickler = make_pickler(buffer, beside(buffers))
    try:
        # The modules are pickled last, when they are complete.
        pickler.dump(parts | extra | {"loaded": pickler.loaded})
    except Exception as error:
        culprit = _find_culprit(training, args, kwargs, make_pickler)
        raise InvalidJobError(f"{culprit} cannot be pickled: {error}", code="RZ-1004") from error
    modules = zip_modules(pickler.needed.union(needed, pickler.loaded))
    return Payload(name, pack(buffer.getvalue(), buffers), modules, refs)


def _pickle_restart_on(restart_on: object) -> tuple[dict[str, bytes], set[str]]:
    """Returns the part of the payload with ``restart_on``, and the user's modules that it needs."""
    if not restart_on:
        return {}, set()
    buffer = io.BytesIO()
    pickler = TrainingPickler(buffer)
    try:
        pickler.dump(restart_on)
    except Exception as error:
        raise InvalidJobError(f"restart_on={restart_on!r} cannot be pickled: {error}") from error
    return {"restart_on": buffer.getvalue()}, pickler.needed


def _build_program(
    program: Script | Module | Command,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extra: dict[str, bytes],
    needed: set[str],
    refs: list[ResultRef],
) -> Payload:
    """Builds the payload of a script, module or command, which take a command line."""
    if kwargs:
        raise InvalidJobError(
            f"a {type(program).__name__.lower()} takes positional arguments only, not {', '.join(sorted(kwargs))}: "
            f"write '--{next(iter(kwargs))}', value"
        )
    line = tuple(value if isinstance(value, ResultRef) else str(value) for value in args)
    modules = zip_modules(program.imports() | needed, program.directory)
    parts = {**program.parts(), "args": (*program.line, *line), **extra}
    return Payload(program.name, pack(pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL), []), modules, refs)


def _find_culprit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], make_pickler: _Maker
) -> str:
    """Returns the name of the argument or function that cannot be pickled."""
    for name, value in named_arguments(function, args, kwargs):
        try:
            make_pickler(io.BytesIO()).dump(value)
        except Exception:
            return f"argument {name!r} (a {type(value).__name__})"
    return f"train={name_of(function)}, or something it refers to,"


_WORLD_OF_ACCELERATE = "accelerate.state"
_OF_THE_DRIVER = ("DataFrame", "SparkSession", "SparkContext", "RDD")


class TrainingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by reference into user modules that ranks can import, which it collects; other user code by value."""

    def __init__(
        self,
        file: io.BytesIO,
        on_buffer: Callable[[pickle.PickleBuffer], bool] | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self._is_alone = is_alone
        self.needed: set[str] = set()
        # Ranks import them. They do not count for the identity: another process may have loaded others.
        self.loaded: list[str] = []
        self._by_value: list[Any] = []
        self._decided: dict[str, bool] = {}

    def dump(self, obj: object) -> None:
        """Pickles an object; one thread of this process at a time."""
        forget_places()
        with _REGISTRY_LOCK:
            try:
                super().dump(obj)
            finally:
                for module in self._by_value:
                    cloudpickle.unregister_pickle_by_value(module)
                self._by_value.clear()

    def travels(self, name: str) -> bool:
        """Returns True for a module that is shipped as source; each name is decided once, by `_decide`."""
        if name not in self._decided:
            self._decided[name] = self._decide(name)
        return self._decided[name]

    def _decide(self, name: str) -> bool:
        """Returns True for a module that is shipped as source; registers a user's other module as pickled by value."""
        if travels_as_source(name):
            return True
        # The parents of the module are pickled by value, too.
        for part in itertools.accumulate(name.split("."), "{}.{}".format):
            self._register(sys.modules.get(part))
        return False

    def _register(self, module: object) -> None:
        if not (isinstance(module, types.ModuleType) and is_user_module(module)):
            return
        # A module may be loaded under another name as well.
        name = module.__name__
        is_known = name in cloudpickle.list_registry_pickle_by_value()
        if sys.modules.get(name) is module and not is_known and not travels_as_source(name):
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object like cloudpickle, and collects the modules that it needs."""
        if reduced := tensors.reduce(obj):
            return reduced
        if isinstance(obj, types.ModuleType) and self.travels(obj.__name__):
            self.needed.add(obj.__name__)
            self._note_loaded([obj.__name__])
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType):
            self._note_imports(obj)
            if (wrapper := wrapper_of(obj)) and self.travels(obj.__module__):
                return getattr, (wrapper, "__wrapped__")
        if type(obj).__module__ == _WORLD_OF_ACCELERATE and not self._is_alone:
            raise pickle.PicklingError(
                f"it holds accelerate's {type(obj).__name__}, the world of this process, and every rank would train "
                "alone in it: make TrainingArguments or Accelerator inside of the training function"
            )
        if type(obj).__module__.startswith("pyspark.") and type(obj).__name__ in _OF_THE_DRIVER:
            raise pickle.PicklingError(
                f"ranks have no Spark, and so no {type(obj).__name__}: give a DataFrame as Launcher(dataset=df), and "
                "read it in the function with rankzero.train.get_dataset_shard()"
            )
        module = getattr(obj, "__module__", None)
        if _is_distributed(obj) and not (self.travels(str(module)) and _is_global(obj, str(module))):
            for_ranks: tuple[Any, ...] = obj.in_ranks()
            return for_ranks
        if isinstance(obj, functools.cached_property):
            # Before Python 3.12 it holds a lock.
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
        if isinstance(module, str) and self.travels(module) and _is_global(obj, module):
            self.needed.add(module)
        if isinstance(obj, _CACHED) and not _goes_by_name(obj):
            return _reduce_cached(obj)
        if module is None and isinstance(obj, types.FunctionType):
            # cloudpickle would search every loaded module for it, which takes milliseconds for each function and
            # triggers modules that load lazily. A function that names no module belongs to none.
            reduced = self._dynamic_function_reduce(obj)
        else:
            reduced = with_qualname(super().reducer_override(obj), obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            _, facts = reduced[2]
            names = globals_of_classes(obj.__code__) & obj.__globals__.keys()
            facts["__globals__"] |= {name: obj.__globals__[name] for name in sorted(names)}
        return reduced

    def _note_imports(self, function: types.FunctionType) -> None:
        if hasattr(function, "_torchdynamo_orig_callable") and not _is_global(function, function.__module__):
            raise pickle.PicklingError(
                f"{function.__qualname__} was compiled by torch.compile, and what that made belongs to this process: "
                "call torch.compile inside of the training function"
            )
        imported = imports_of_code(function.__code__, function.__globals__.get("__package__"))
        if by_hand := sorted(filter(is_made_by_hand, imported)):
            raise pickle.PicklingError(
                f"{function.__qualname__} imports {by_hand[0]}, a module that was made by hand and has no file: import "
                "it outside of the function, from where it travels by value, or make it a file"
            )
        self.needed |= imported
        code = function.__code__
        # `import acme.models` makes the name acme.
        roots = {name.partition(".")[0] for name in imported} & {*code.co_varnames}
        used = (function.__globals__.get(name) for name in cloudpickle.cloudpickle._extract_code_globals(code))
        modules = {value.__name__ for value in used if isinstance(value, types.ModuleType)}
        packages = [*filter(is_user_module_name, {*imported, *roots, *modules})]
        self.needed |= submodules_of_code(code, packages)
        self._note_loaded(packages)

    def _note_loaded(self, packages: Iterable[str]) -> None:
        """Notes the modules below packages that this process has loaded: code reaches them by any attribute."""
        self.loaded += sorted(filter(travels_as_source, loaded_below(packages).difference(self.loaded)))


_Maker = Callable[..., TrainingPickler]


_CACHED: Any = functools._lru_cache_wrapper


def _goes_by_name(function: Any) -> bool:
    """Returns True for a function of `functools.lru_cache` that a rank can import."""
    found = cloudpickle.cloudpickle._lookup_module_and_qualname(function, name=function.__qualname__)
    return found is not None and not cloudpickle.cloudpickle._is_registered_pickle_by_value(found[0])


def _reduce_cached(function: Any) -> tuple[Any, ...]:
    """Reduces a function of `functools.lru_cache` to the function that it wraps, with an empty cache."""
    chosen = function.cache_parameters()
    parts = (function.__wrapped__, chosen["maxsize"], chosen["typed"], functools._CacheInfo)
    kept = ("__wrapped__", "cache_parameters", *functools.WRAPPER_ASSIGNMENTS)
    return _CACHED, parts, {name: value for name in kept if (value := getattr(function, name, None)) is not None}


def _is_global(obj: Any, module: str) -> bool:
    """Returns True if pickle can find the object by its name, so that its module is needed."""
    return named_like(obj, module) is obj


def wrapper_of(function: types.FunctionType) -> Any:
    """Returns what `functools.wraps` or `rankzero.distributed` has put in the place of a module's function, or None."""
    found = named_like(function, function.__module__)
    is_wrapper = isinstance(found, types.FunctionType) or _is_distributed(found)
    return found if is_wrapper and getattr(found, "__wrapped__", None) is function else None


def _is_distributed(obj: Any) -> bool:
    return hasattr(type(obj), "launch_function")


def named_like(obj: Any, module: str) -> Any:
    """Returns the object that a module has under the name of ``obj``, or None."""
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found
