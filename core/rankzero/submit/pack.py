"""Packs a function or script, its arguments and the user's modules that they need, and names the training by them.

All that is sent counts. The user's modules, which need not exist where the ranks run, are sent as files if they can be
imported by their names; then their functions and classes are pickled by reference, so that each exists once. All other
code of the user is pickled by value, as far as the function refers to it. Inodes, times, retries, the location of a
value, comments and the layout of sources do not count.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import logging
import marshal
import os
import pickle
import re
import secrets
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _dynamic_class_reduce, _extract_code_globals, dynamic_subimport

from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.kinds import NumProcesses
from rankzero.run import identity
from rankzero.run.identity import DIGITS
from rankzero.submit import code
from rankzero.submit.code_files import Modules, UserCode
from rankzero.submit.training import Program, bind, check_callable, name_of, resolve
from rankzero.tracking.tracker import Tracker
from rankzero.values.formats import digest_of
from rankzero.values.pickled import Part, beside, pack, reduce_tensor
from rankzero.values.ref import ResultRef, map_refs

logger = logging.getLogger(__name__)

_NAME = re.compile(rb"\x8c(.)([A-Za-z_]\w*(?:[.:]\w*)+)([%{]?)", re.DOTALL)
"""A short text in a pickle, behind its length, that may name something in a module, or begin such a name."""


@dataclass(frozen=True)
class Payload:
    """The function or script, arguments and modules that are sent to the workers."""

    name: str  # Display name of the function or script
    data: list[Part]  # The pickle of function or script and arguments, made by `rankzero.values.pickled.pack`
    modules: Modules  # The user modules that are shipped with it
    refs: list[ResultRef]  # Those among the arguments and in a trainer's configuration
    training: Any  # The result of `rankzero.submit.training.resolve`
    arguments: dict[str, Any]  # By name

    def identity(
        self, world_size: NumProcesses, code_version: str | None = None, user_code: UserCode | None = None
    ) -> dict[str, str]:
        """Returns the checksums of the training's parts by name; ``code_version`` replaces those of its code."""
        digest_of, train = Contents().digest_of, self.training
        parts = {identity.NUM_PROCESSES: repr(world_size)}
        for name, value in self.arguments.items():
            parts[f"{identity.ARGUMENT}{name}"] = _compared(f"the argument {name}", digest_of, value)
        if code_version is not None:
            version = hashlib.sha256(repr(code_version).encode()).hexdigest()
            return parts | {identity.CODE_VERSION: version[:DIGITS]}
        if user_code and user_code.sent:
            parts[identity.SENT_CODE] = user_code.sent[0][:DIGITS]
        if isinstance(train, Program):
            # Where a script lies does not count.
            facts = (train.kind, train.target, train.line)
            own = code.digest_of_source(train.source) if train.kind == "script" else digest_of(facts)
            parts[identity.TRAIN] = own[:DIGITS]
        else:
            parts[identity.TRAIN] = _compared("the function", digest_of, train)
        return parts | {f"{identity.MODULE}{name}": digest[:DIGITS] for name, digest in self.modules.counted.items()}


def _compared(what: str, digest_of: Callable[[object], str], value: object) -> str:
    """Returns a checksum; of what has none, since its class may do anything while it is pickled, another each time."""
    try:
        return digest_of(value)[:DIGITS]
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = "%s cannot be compared: it counts as changed, except if an orchestrator tries again by itself: %s"
        logger.warning(text, what, why)
        return identity.RESISTS + secrets.token_hex(DIGITS // 2)


def build(train: object, args: tuple[Any, ...], kwargs: dict[str, Any], restart_on: object = ()) -> Payload:
    """Builds the payload of a training.

    `ResultRef` objects in the arguments, also nested, are opened in the workers, and so are those in the
    ``launch_config`` of a compatibility layer's trainer, a dict that counts as an argument. A rank that fails loads the
    exceptions of ``restart_on``.

    Raises:
        InvalidJobError: ``train`` cannot be run, the arguments do not fit its signature, or an object cannot be
            pickled.
    """
    refs: list[ResultRef] = []
    map_refs([list(args), dict(kwargs), getattr(train, "launch_config", None)], refs.append)
    training = resolve(train)
    buffers: list[memoryview] = []
    pickler, other = TrainingPickler(beside(buffers)), TrainingPickler()
    if isinstance(training, Program):
        if kwargs:
            raise InvalidJobError(
                f"a {training.kind} takes positional arguments only, not {', '.join(sorted(kwargs))}: "
                f"write '--{next(iter(kwargs))}', value"
            )
        name, needs, first = training.name, training.needs, training.first
        line = [value if isinstance(value, ResultRef) else str(value) for value in args]
        parts: dict[str, Any] = {"kind": training.kind, "args": (*training.line, *line)}
        is_script = training.kind == "script"
        parts |= {"path": training.target, "source": training.source} if is_script else {"name": training.target}
    else:
        check_callable(training, args, kwargs)
        name, needs, first = name_of(training), code.Source(), None
        parts = {"kind": "function", "name": name, "function": training, "args": args, "kwargs": kwargs}
        # Pickled last, when it is complete.
        parts["loaded"] = pickler.loaded
    arguments = bind(training, args, kwargs)
    try:
        restart = {"restart_on": other.dumps(restart_on)} if restart_on else {}
        pickled = pickler.dumps(restart | parts)
    except Exception as error:
        culprit = f"train={name}, or something it refers to,"
        for argument, value in arguments.items():
            try:
                TrainingPickler().dumps(value)
            except Exception:
                culprit = f"argument {argument!r} (a {type(value).__name__})"
        raise InvalidJobError(f"{culprit} cannot be pickled: {error}", code="RZ-1004") from error
    found = [text for length, text, mark in _NAME.findall(pickled) if mark or length[0] == len(text)]
    texts = pickler.texts.union(text.decode().replace(":", ".") for text in found) - pickler.by_value
    if needs.computes or pickler.computes:
        texts |= {value for value in (*args, *kwargs.values()) if isinstance(value, str)}
    needs = code.Source(imports=needs.imports | pickler.modules | other.modules, texts=needs.texts | texts)
    return Payload(name, pack(pickled, buffers), Modules(needs, first, pickler.by_value), refs, training, arguments)


def pack_trackers(trackers: Sequence[Tracker], engine: Engine) -> dict[str, Any] | None:
    """Packs trackers, and the search path for their modules, as JSON for the driver; None without trackers.

    Raises InvalidJobError if one cannot be pickled, or cannot work on this machine, where the driver will run.
    """
    pickles = []
    for tracker in trackers:
        if not engine.drives_elsewhere:
            tracker.check()
        try:
            pickles.append(base64.b64encode(TrainingPickler().dumps(tracker)).decode())
        except Exception as error:
            raise InvalidJobError(
                f"trackers has {type(tracker).__name__}, which cannot be pickled: {error}; make clients in begin()"
            ) from error
    path = [] if engine.drives_elsewhere else [os.path.abspath(entry) for entry in sys.path]
    return {"pickles": pickles, "path": path} if pickles else None


class TrainingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what ranks get, and collects what it needs of the user's modules."""

    def __init__(self, on_buffer: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=on_buffer)
        self.modules: set[str] = set()  # Names that ranks import; some may be no modules
        self.by_value: set[str] = set()  # Names in the pickle that are those of modules whose code it has
        self.texts: set[str] = set()  # Texts in functions of the user that may name modules
        self.computes = False  # Whether one of these functions may import by any text
        self.loaded: list[str] = []  # Loaded modules below these, which code may reach by any attribute

    def dumps(self, obj: object) -> bytes:
        """Pickles an object and collects what it needs of the user's modules."""
        code.forget_places()
        self.dump(obj)
        return self._stream.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        """Reduces an object like cloudpickle, and collects the modules that it needs."""
        return reduce_tensor(obj) or self._reduce(obj)

    def _reduce(self, obj: Any) -> Any:
        cls, module = type(obj), getattr(obj, "__module__", None)
        if isinstance(obj, types.ModuleType):
            return self._module(obj)
        if cls.__module__ == "accelerate.state":
            raise pickle.PicklingError(
                f"it holds accelerate's {cls.__name__}, the world of this process, and every rank would train "
                "alone in it: make TrainingArguments or Accelerator inside of the training function"
            )
        is_by_name = not isinstance(obj, (type, types.FunctionType)) or code.is_sent_by_name(obj)
        is_shipped = isinstance(module, str) and code.travels(module)
        function = obj.launch_function if code.is_distributed(obj) else obj
        if isinstance(function, types.FunctionType) and (is_shipped or not is_by_name):
            self._note_imports(function)
        if (reduced := code.reduce_wrapper(obj)) is not None:
            return reduced
        if code.is_importable(obj):
            self.modules.add(str(module))
        if is_by_name:
            return super().reducer_override(obj)
        # Not by cloudpickle's own decision, which knows nothing of the user's modules, and searches every loaded module
        # for a function that names none, which takes milliseconds and triggers modules that load lazily.
        self.by_value.add(str(module))
        if isinstance(obj, type):
            return _dynamic_class_reduce(obj)
        self.by_value |= {str(obj.__globals__.get(name)) for name in ("__name__", "__package__")}
        return self._dynamic_function_reduce(obj)

    def _module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if code.travels(name):
            self._note({name})
            return importlib.import_module, (name,)
        if code.is_sent_by_value(name):
            self.by_value |= {name, str(module.__package__)}
            return dynamic_subimport, (name, {key: each for key, each in vars(module).items() if key != "__builtins__"})
        return NotImplemented

    def _note_imports(self, function: types.FunctionType) -> None:
        used = [function.__globals__.get(name) for name in _extract_code_globals(function.__code__)]
        modules = {each.__name__ for each in used if isinstance(each, types.ModuleType)}
        source = code.source_of_code(function.__code__, function.__globals__.get("__package__"))
        self.texts |= source.texts
        self.computes = self.computes or source.computes
        self._note(source.imports.union(filter(code.travels, modules)))

    def _note(self, names: Iterable[str]) -> None:
        """Notes names that code imports, and the modules below those that this process has loaded."""
        for package in filter(code.travels, names):
            found = {name for name in list(sys.modules) if name.startswith(f"{package}.")}.difference(self.loaded)
            self.loaded += sorted(filter(code.travels, found))
        self.modules.update(names)


class Contents:
    """Computes checksums of values, and of code that is sent by value, by content and equal in every process.

    A pickle differs between processes: sets have another order, classes of a script have random names. Here a value is
    a label and its parts, whose checksums make its own. Most objects have the parts that their pickle has.
    """

    def __init__(self) -> None:
        # Checksums of objects by their id. The objects are kept, so that no other one gets their id.
        self._known: dict[int, tuple[bytes, object]] = {}
        # Depth of each value that is being visited, by its id: one may refer to itself.
        self._open: dict[int, int] = {}

    def digest_of(self, value: object) -> str:
        """Returns the checksum of a value. Raises what its pickling raises."""
        return hashlib.sha256(self._visit(value)).hexdigest()

    def _visit(self, value: object) -> bytes:
        """Returns the checksum of a value; that of a set whose objects refer to each other depends on their order."""
        if (plain := _plain(value)) is not None:
            return plain
        if found := self._known.get(id(value)):
            return found[0]
        if id(value) in self._open:
            return b"loop %d" % (len(self._open) - self._open[id(value)])
        self._open[id(value)] = len(self._open)
        try:
            label, parts = self._parts(value)
            done = list(map(self._visit, parts))
        finally:
            del self._open[id(value)]
        if label in (dict, set, frozenset):
            done.sort()
        digest = hashlib.sha256(marshal.dumps([repr(label), *done], 2)).digest()
        self._known[id(value)] = digest, value
        return digest

    def _parts(self, value: Any) -> tuple[object, Iterable[Any]]:
        """Returns the label of a value, and its parts."""
        cls = type(value)
        if cls is ResultRef:
            return ("result", value.format, value.digest), ()
        if cls in (list, tuple, set, frozenset, dict):
            return cls, value.items() if cls is dict else value
        if isinstance(value, (set, frozenset)):
            return "set", [cls, frozenset(value), getattr(value, "__dict__", {})]
        if isinstance(value, typing.TypeVar):
            return "TypeVar", [value.__name__, value.__bound__, value.__constraints__]
        if isinstance(value, pickle.PickleBuffer):
            return digest_of([value.raw()]), ()
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            is_sent = code.is_sent_by_value(value.__name__)
            sent = {name: each for name, each in vars(value).items() if is_sent and name[:2] != "__"}
            return ("module", "" if is_sent else value.__name__), [sent]
        reduced = reduce_tensor(value) or code.reduce_wrapper(value)
        if reduced is None:
            reducer = cloudpickle.Pickler.dispatch_table.get(cls)
            reduced = reducer(value) if reducer else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, str):
            return ("global", str(getattr(value, "__module__", "")), reduced), [cls]
        # Items come as iterators.
        return "object", [cls, *(list(part) if hasattr(part, "__next__") else part for part in reduced)]

    def _function(self, function: types.FunctionType) -> tuple[object, Iterable[Any]]:
        if code.is_sent_by_name(function):
            return ("name", function.__module__, function.__qualname__), ()
        names = function.__globals__.keys() & {*_extract_code_globals(function.__code__)}
        used = {name: function.__globals__[name] for name in sorted(names)}
        values = [function.__defaults__, function.__kwdefaults__, vars(function), function.__closure__]
        return ("function", function.__qualname__, code.digest_of_code(function.__code__)), [used, *values]

    def _class(self, cls: type) -> tuple[object, Iterable[Any]]:
        if code.is_sent_by_name(cls):
            return ("name", cls.__module__, cls.__qualname__), ()
        own = [name for name in sorted(vars(cls)) if name == "__pydantic_fields__" or not name.startswith(_DERIVED)]
        members = {name: vars(cls)[name] for name in own}
        return ("class", cls.__qualname__), [type(cls), cls.__bases__, members]


_DERIVED = (
    *("__dict__", "__weakref__", "__module__", "__doc__", "__annot", "__static_attributes__", "__firstlineno__"),
    *("__slotnames__", "__signature__", "__pydantic_", "__private_attributes__", "_abc_", "_backward_cls"),
)
"""Beginnings of the names of members that do not count, or that are made of others."""

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})


def _plain(value: Any) -> bytes | None:
    """Returns the bytes of a plain value, or of a list of those; None for any other value.

    Item by item a million numbers take seconds; this takes 30 ms. Version 2 of marshal writes no references.
    """
    cls = type(value)
    if cls not in _PLAIN and not (cls in (list, tuple) and set(map(type, value)) <= _PLAIN):
        return None
    data = marshal.dumps(value, 2)
    return data if len(data) < 64 else hashlib.sha256(data).digest()
