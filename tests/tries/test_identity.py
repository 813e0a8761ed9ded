"""What tells a training from another one."""

import functools
import importlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from tests.conftest import ROOT
from tests.contract.kinds_of_values import KINDS, arguments
from tests.loading import load_module
from tests.tries.identities import identity_by, identity_of

from rankzero import Launcher, ResultRef, SparkEngine
from rankzero.run.identity import compare, describe, digest_of_parts
from rankzero.submit import pack


class Sealed:
    """Pickles once, and then refuses."""

    def __init__(self) -> None:
        self.is_open = True

    def __reduce__(self) -> Any:
        if not self.is_open:
            raise TypeError("sealed")
        self.is_open = False
        return Sealed, ()


def test_what_cannot_be_compared_is_unchanged_for_a_retry_and_changed_for_a_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = (identity_of(print_it, (Sealed(),), {}, 1) for _ in range(2))
    assert compare(one, other).differing == ("argument value",)
    assert compare(one, other, automatic=True).same
    assert "the argument value cannot be compared" in caplog.text
    assert "TypeError: sealed" in caplog.text


def take(**_: object) -> None: ...


def of_all_kinds() -> dict[str, str]:
    values = {}
    for name, make in {**KINDS, **arguments()}.items():
        torch.manual_seed(1)
        if name != "lock":
            values[name] = make()
    halves = [dict(itertools.islice(values.items(), first, None, 2)) for first in (0, 1)]
    parts = dict(part for half in halves for part in identity_of(take, (), half, 1).items())
    return {name: parts[f"argument {name}"] for name in values}


OF_ALL_KINDS = """
import gc, json, sys
gc.disable()
from tests.tries.test_identity import of_all_kinds
json.dump(of_all_kinds(), sys.stdout)
"""


def test_every_kind_of_argument_counts_the_same_in_two_processes() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", OF_ALL_KINDS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be compared" not in done.stderr, done.stderr
    made = json.loads(done.stdout), of_all_kinds()
    different = {name for name in made[0] if made[0][name] != made[1][name]}
    assert different == set()
    assert len(set(made[0].values())) > 0.8 * len(made[0]), "many kinds count as one"


class Watched(types.ModuleType):
    """A module that notes who looks into it, as one that loads lazily would load then."""

    woken: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.woken.append(name)
        raise AttributeError(name)


def test_a_function_without_a_module_is_looked_for_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("watched_module")
    watched.woken = []
    monkeypatch.setitem(sys.modules, watched.__name__, watched)
    made: dict[str, Any] = {}
    exec("def helper(x):\n    return x\n\ndef train_it(x):\n    return helper(x)\n", made)
    assert made["train_it"].__module__ is None
    identity = of(made["train_it"], 1)
    pack.build(made["train_it"], (1,), {})
    assert watched.woken == []
    again: dict[str, Any] = {}
    exec("def helper(x):\n    return x + 1\n\ndef train_it(x):\n    return helper(x)\n", again)
    assert identity == of(made["train_it"], 1) != of(again["train_it"], 1)


def test_what_differs_has_a_name(helper: Path) -> None:
    module = load_module(helper.stem)
    before = identity_of(module.scale, (1,), {}, 2)
    edited(helper.with_name(f"{helper.stem}_rates.py"), "RATE = 2", "RATE = 3")
    after = identity_of(module.scale, (2,), {}, 4)
    compared = compare(before, after)
    assert compared.differing == ("argument x", f"module {helper.stem}_rates", "num_processes")
    assert describe(compared.differing) == f"num_processes, argument x, module {helper.stem}_rates"
    by_version = [identity_of(module.scale, (1,), {}, 2, code_version=version) for version in ("1", "2")]
    assert compare(*by_version).differing == ("code_version",)
    assert compare(before, by_version[0]).differing == ("code_version",)


def test_code_does_not_count_for_an_automatic_try(helper: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(helper=helper.stem))
    function = load_module(helper.stem).scale
    for train, args in ((str(script), ()), (function, (1,))):
        before = identity_of(train, args, {}, 2)
        edited(helper.with_name(f"{helper.stem}_rates.py"), "RATE = ", "RATE = 1")
        after = identity_of(train, args, {}, 2)
        assert compare(before, after, automatic=True).ignored == (f"module {helper.stem}_rates",)
        assert compare(before, after, automatic=True).same
        assert not compare(before, after).same
    before = identity_of(str(script), (), {}, 2)
    edited(script, "train(0.1)", "train(0.2)")
    assert compare(before, identity_of(str(script), (), {}, 2), automatic=True).ignored == ("train",)
    assert not compare(before, identity_of(str(script), ("0.1",), {}, 2), automatic=True).same
    assert not compare(before, identity_of(str(script), (), {}, 4), automatic=True).same
    functions = [identity_of(train, (), {}, 2) for train in (nested(0.1), nested_otherwise(0.1))]
    assert compare(*functions).differing == compare(*functions, automatic=True).ignored == ("train",)


# -- values --------------------------------------------------------------------------------------


class Node:
    def __init__(self, following: object) -> None:
        self.following = following


class Tagged(torch.Tensor):
    pass


NUMBERS, CONJUGATED = torch.tensor([1 + 2j, 3 - 4j]), torch.tensor([1 - 2j, 3 + 4j])
PLAIN, RESULT = numpy.arange(6.0).reshape(2, 3), ResultRef("/a/value-0.torch", "torch", "ab" * 32, 9, {"loss": 1.0})


def looped(value: object) -> dict[str, object]:
    made = {"value": value}
    made["me"] = made
    return made


def shared(value: object) -> list[object]:
    made = [value]
    for _ in range(200):
        made = [made, made]
    return made


def tagged(unit: str) -> torch.Tensor:
    made = torch.ones(2)
    vars(made)["unit"] = unit
    return made


def frame(y: float = 0.5, **attrs: object) -> Any:
    made = pandas.DataFrame({"at": pandas.to_datetime(["2024-01-01", None]), "x": [1, 2]}, index=["a", "b"])
    made["kind"], made["y"], made["text"] = pandas.Categorical(["u", "v"]), [y, float("nan")], ["p", None]
    made.attrs.update(attrs)
    return made


def levels(kind: str) -> Any:
    return pandas.MultiIndex.from_arrays([numpy.array([1], kind), [2]])


def dates(last: str = "2024-01-03", **facts: Any) -> Any:
    return pandas.Series([0.5, 1.5], index=pandas.DatetimeIndex(["2024-01-01", last], **facts))


VALUES: dict[str, Callable[[], tuple[Any, Any, list[Any]]]] = {
    "number": lambda: (1.0, 1.0, [2.0, 1, True, "1.0", (1.0,)]),
    "set": lambda: ({"a", "b"}, {"b", "a"}, [frozenset("ab"), {"a"}, ["a", "b"]]),
    "dict": lambda: ({"lr": 1, "b": [2]}, {"b": [2], "lr": 1}, [{"lr": 1, "b": [3]}]),
    "many": lambda: ([*range(1000)], list(range(1000)), [[*range(999), -1], tuple(range(1000)), [True] * 1000]),
    "rows": lambda: ([[0.5, "ab"]] * 1000, [[0.5, "".join("ab")] for _ in range(1000)], [[[0.5, "b"]] * 1000]),
    "loop": lambda: (looped(1), looped(1), [looped(2)]),
    "shared": lambda: (shared(1), shared(1), [shared(2)]),
    "deep": lambda: (nested_in(Node, 1), nested_in(Node, 1), [nested_in(Node, 2), nested_in(Node, 1, 149)]),
    "result": lambda: (RESULT, replace(RESULT, uri="s3://b/value-3", summary={}), [replace(RESULT, digest="cd" * 32)]),
    "array": lambda: (PLAIN, PLAIN.copy(), [PLAIN + 1, PLAIN.reshape(3, 2), PLAIN.astype(">f8")]),
    "objects": lambda: (*(numpy.array([["a", 1]], object) for _ in "12"), [numpy.array([["a", 2]], object)]),
    "generator": lambda: (*map(numpy.random.default_rng, (1, 1)), [numpy.random.default_rng(2)]),
    "tensor": lambda: (torch.arange(10.0)[2:4], torch.tensor([2.0, 3.0]), [torch.tensor([2.0, 3.0]).double()]),
    "conjugated": lambda: (NUMBERS.conj(), CONJUGATED, [NUMBERS, torch.nn.Parameter(CONJUGATED)]),
    "sparse": lambda: (NUMBERS.conj().to_sparse(), CONJUGATED.to_sparse(), [NUMBERS.to_sparse()]),
    "subclass": lambda: (NUMBERS.clone().as_subclass(Tagged), NUMBERS.as_subclass(Tagged), [NUMBERS]),
    "attribute": lambda: (tagged("m"), tagged("m"), [tagged("s"), torch.ones(2)]),
    "frame": lambda: (frame(), frame(), [frame(0.25), frame(unit="m"), frame().rename_axis("id")]),
    "levels": lambda: (levels("i8"), levels("i8"), [levels("i4"), levels("i8")[:0]]),
    "dates": lambda: (dates(), dates(), [dates("2024-01-04"), dates(tz="Europe/Berlin"), dates(name="at")]),
    "moment": lambda: (pandas.Timestamp(0), pandas.Timestamp(0), [pandas.Timestamp(1), pandas.NaT]),
}
"""By kind, a value, an equal one, and others."""


@pytest.mark.parametrize("kind", VALUES)
def test_values_count_by_content(kind: str) -> None:
    value, equal, others = VALUES[kind]()
    digests = [of(print_it, each) for each in (value, *others)]
    assert of(print_it, equal) == digests[0]
    assert len(set(digests)) == len(digests)


def nested_in(kind: Callable[[object], object], value: object, depth: int = 150) -> object:
    return functools.reduce(lambda following, _: kind(following), range(depth), value)


# -- trainings ---------------------------------------------------------------------------------


def print_it(value: object) -> None:
    print(value)


SCRIPT = """
import rankzero.train as rt
import {helper}

def train(lr):
    # Says how far it has come.
    return {helper}.scale(lr)

rt.set_result(train(0.1))
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, which imports another one when it is called."""
    name = f"helper_{secrets.token_hex(4)}"
    (tmp_path / f"{name}_rates.py").write_text("RATE = 2\n")
    path = tmp_path / f"{name}.py"
    path.write_text(f"def scale(x):\n    from {name}_rates import RATE\n    return RATE * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def of(train: object, *args: object, world_size: int = 2, **more: Any) -> str:
    made = digest_of_parts(identity_of(train, args, {}, world_size, **more))
    assert len(made) == 16
    return made


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    # Two edits may fall into one tick of the file system's clock, and be of one size.
    moment = time.time_ns()
    os.utime(path, ns=(moment, moment))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("what", "same"),
    [
        pytest.param(
            ("script", "# Says how far it has come.", "# Another remark, and an empty line.\n"), True, id="a comment"
        ),
        pytest.param(("script", "train(0.1)", "train(0.2)"), False, id="the script"),
        pytest.param(("helper", "RATE * x", "RATE * x + 1"), False, id="a module that it imports"),
        pytest.param(("rates", "RATE = 2", "RATE = 3"), False, id="a module that this one imports"),
        pytest.param(
            ("helper", "    return RATE * x", "\n    return   RATE \\\n * x"), True, id="the layout of a module"
        ),
    ],
)
def test_a_script_counts_by_content(helper: Path, tmp_path: Path, what: tuple[str, str, str], same: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(helper=helper.stem))
    files = {"script": script, "helper": helper, "rates": helper.with_name(f"{helper.stem}_rates.py")}
    before = of(str(script), "--epochs", 3)
    edited(files[what[0]], *what[1:])
    assert (of(str(script), "--epochs", 3) == before) is same
    # Where it lies does not matter: a bundle has another path for each version.
    elsewhere = tmp_path / "version-2"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(script.read_text())
    assert of(str(elsewhere / "train.py"), "--epochs", 3) == of(str(script), "--epochs", 3)


def nested(rate: float, shift: int = 0) -> Callable[[], float]:
    def train() -> float:
        return rate * 2 + shift

    return train


def nested_otherwise(rate: float, shift: int = 0) -> Callable[[], float]:
    def train() -> float:
        return rate * 3 + shift

    train.__qualname__ = "nested.<locals>.train"
    return train


def test_a_closure_counts_by_its_code_and_by_what_it_holds() -> None:
    same = of(nested(0.1))
    assert of(nested(0.1)) == same
    different = [nested(0.2), nested(0.1, 1), nested_otherwise(0.1), functools.partial(nested(0.1))]
    assert len({same, *map(of, different)}) == 5


NOTEBOOK = """
import threading
from dataclasses import dataclass

LAYERS = 2
LOCK = threading.Lock()

@dataclass
class Config:
    rate: float = 0.1

class Model:
    def size(self):
        return 1

def helper(depth):
    return helper(depth - 1) if depth else Model().size()

def train(config):
    return helper(3) * config.rate * config.LOCK * LAYERS
"""


def test_a_function_of_a_notebook_counts_by_what_it_refers_to() -> None:
    def digest(old: str = "", new: str = "") -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(NOTEBOOK.replace(old, new) if old else NOTEBOOK, names)
        return of(names["train"], names["Config"]())

    # An attribute may have the name of a global that cannot be compared.
    before = digest()
    assert digest("LAYERS = 2", "X = 5\ndef other():\n    return 1\nLAYERS = 2") == before
    edits = [("return 1", "return 2"), ("LAYERS = 2", "LAYERS = 3"), ("0.1", "0.2"), ("if depth", "if depth > 1")]
    assert len({before, *(digest(*edit) for edit in edits)}) == len(edits) + 1


CLASSES = """
import functools, gc, sys, threading
gc.disable()
import pydantic, torch
from dataclasses import dataclass, field, make_dataclass
from typing import Generic, NamedTuple, TypeVar
from tests.tries.identities import identity_of
from rankzero.run.identity import digest_of_parts

Item = TypeVar("Item")

class Named(NamedTuple):
    lr: float

class Pairs(dict): pass
class Rows(list): pass
class Rate(float): pass

@dataclass(slots=True)
class Base:
    lr: float

@dataclass(slots=True)
class Slots(Base):
    depth: int = 1

class Slot:
    __slots__ = "lr"
    def __init__(self, lr): self.lr = lr

class Stateful:
    def __init__(self, lr): self.lr, self.lock = lr, threading.Lock()
    def __getstate__(self): return {"lr": self.lr}

class Loop:
    def __init__(self, lr): self.lr, self.me = lr, self

class Names(set): pass

class Model(pydantic.BaseModel):
    lr: float

def autograd(lr):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return lr * x
    return Scaled

def generic(lr):
    class Typed(Generic[Item]):
        rate = lr
    return Typed()

def cached(lr):
    @functools.cache
    def rate(epoch): return lr / epoch if epoch < 9 else rate(epoch - 1)
    return rate

class Lazy:
    def __init__(self, lr): self.lr = lr
    @functools.cached_property
    def rate(self): return self.lr

def several(lr): return Names({f"{lr}-{number}" for number in range(9)})

def made(lr): return make_dataclass("Made", ["lr"])(lr)
def noted(lr): return make_dataclass("Noted", [("x", int, field(default=1, metadata={"lr": lr}))])()
def partial(lr): return type("Partial", (Rate,), {"__init__": functools.partialmethod(Lazy.__init__, lr)})
def versioned(lr): return type("Versioned", (), {"__version__": lr})()

def train(value): pass

# torch counts them.
[autograd(0) for _ in range(len(sys.argv))]
KINDS = (several, autograd, generic, cached, Lazy, made, noted, partial, versioned, lambda lr: Model(lr=lr))
for make in (Named, lambda lr: Pairs(lr=lr), lambda lr: Rows([lr]), Rate, Slots, Slot, Stateful, Loop, *KINDS):
    print(*(digest_of_parts(identity_of(train, (make(lr),), {}, 1)) for lr in (0.1, 0.1, 0.5)))
"""


def test_functions_of_one_name_in_two_modules_are_not_interchangeable(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = []
    for name in ("one", "two"):
        monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
        exec(f"def loss(): return {name!r}", vars(module))
        pair.append(module.loss)
    assert identity_of(print_it, (pair,), {}, 1) != identity_of(print_it, (pair[::-1],), {}, 1)


def test_what_a_try_covers_counts() -> None:
    """Which instructions that are is in no instruction."""

    made = []
    # On one line: else another instruction has another line, and a NOP keeps it.
    for body in ("try: step(); step(); value = 1", "step()\n  try: step(); value = 1"):
        names: dict[str, Any] = {"__name__": "__main__", "step": print}
        exec(f"def f():\n  {body}\n  except ValueError: value = 2\n  return value", names)
        made.append(names["f"])
    both, second = made
    assert both.__code__.co_code == second.__code__.co_code
    assert identity_of(both, (), {}, 1) != identity_of(second, (), {}, 1)


def test_objects_of_every_kind_of_class_count_by_content() -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", CLASSES]
    done = [
        subprocess.run([*command, *words], check=True, capture_output=True, text=True, env=environment)
        for words in ([], ["another", "count"])
    ]
    assert done[0].stderr == done[1].stderr == ""
    assert done[0].stdout == done[1].stdout
    for line in done[0].stdout.splitlines():
        one, again, other = line.split()
        assert len(one) == 16
        assert one == again != other


PYDANTIC = """
from typing import Annotated, Optional
import pydantic, pydantic.dataclasses

class Config(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    lr: float = 0.1
    decay: float = 0.0
    layers: Annotated[int, pydantic.Field(gt=0)] = 2
    names: list[str] = pydantic.Field(default_factory=list)
    inner: Optional["Config"] = None

    @pydantic.field_validator("lr")
    @classmethod
    def check(cls, value):
        return value

    @pydantic.computed_field
    @property
    def twice(self) -> float:
        return self.lr * 2

@pydantic.dataclasses.dataclass
class Step:
    epochs: int = 1

def train():
    return Config(), Step
"""

EDITS = [
    ("lr: float = 0.1", "lr: float = 0.2"),
    ("gt=0", "gt=1"),
    ("        return value", "        return value * 2"),
    ("self.lr * 2", "self.lr * 3"),
    ("frozen=True", "frozen=False"),
    ("epochs: int = 1", "epochs: int = 2"),
]


def test_models_of_pydantic_count_by_what_their_class_says() -> None:
    digests = []
    for edit in (("", ""), *EDITS):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(PYDANTIC.replace(*edit), names)
        before = of(names["train"])
        names["Config"](lr=0.3).model_dump_json()
        assert of(names["train"]) == before
        digests.append(before)
    assert len(set(digests)) == len(EDITS) + 1


def test_a_source_that_is_replaced_with_an_old_time_is_read_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    digests = []
    for rate in (1, 2):
        script.write_text(f"RATE = {rate}\n")
        os.utime(script, ns=(0, 0))
        digests.append(of(str(script)))
    assert digests[0] != digests[1]


def test_a_submodule_counts_that_a_function_reaches_through_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"acme_{secrets.token_hex(4)}"
    models = tmp_path / name / "models"
    models.mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    (models / "__init__.py").touch()
    net = models / "net.py"
    net.write_text("def layers():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(f"import {name}.models.net\nimport {name}.models as m\n", made)
    for body in (f"return {name}.models.net.layers()", "return [m.net.layers() for _ in range(2)]"):
        exec(
            f"def train():\n    {body}\nclass Net:\n    def f(self):\n        {body}\ndef use():\n    return Net", made
        )
        for function in (made["train"], made["use"]):
            net.write_text("def layers():\n    return 1\n")
            before = identity_of(function, (), {}, 1)
            net.write_text("def layers():\n    return 2\n")
            assert compare(before, identity_of(function, (), {}, 1)).differing == (f"module {name}.models.net",)


# -- what is shipped beside the modules --------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's with data files."""
    root = tmp_path / f"acme_{secrets.token_hex(4)}"
    models = root / "models"
    models.mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "conf.json").write_text('{"lr": 0.1}')
    (root / "server.pem").write_text("secret")
    (root / "unrelated.py").write_text("N = 1\n")
    (root / "job.py").write_text(f"from {root.name} import models\n\ndef train():\n    return models.ALL\n")
    (models / "__init__.py").write_text("ALL = []\n")
    (models / "small.py").write_text("LAYERS = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def test_the_data_files_of_a_package_count(package: Path) -> None:
    def identity() -> Any:
        return identity_of(f"{package.name}.job:train", (), {}, 2)

    before = identity()
    (package / "server.pem").write_text("another secret, which is not shipped")
    (package / ".hidden").write_text("not shipped either")
    assert identity() == before
    edited(package / "conf.json", "0.1", "0.2")
    assert compare(before, identity()).differing == (f"module {package.name} (data files)",)
    edited(package / "conf.json", "0.2", "0.1")
    edited(package / "unrelated.py", "1", "2")
    assert compare(before, identity()).differing == (f"module {package.name}.unrelated",)
    edited(package / "unrelated.py", "2", "1")
    (package / "assets").mkdir()
    (package / "assets" / "words.txt").write_text("a b c")
    assert compare(before, identity()).differing == (f"module {package.name} (data files)",)


def test_data_files_of_a_package_in_a_folder_without_init_are_shipped_and_count(package: Path, tmp_path: Path) -> None:
    namespace = tmp_path / f"company_{secrets.token_hex(4)}"
    namespace.mkdir()
    (namespace / "notes.txt").write_text("no part of a package")
    package.rename(namespace / "ml")
    (namespace / "ml" / "job.py").write_text("def train():\n    return 1\n")
    importlib.invalidate_caches()
    before = identity_of(f"{namespace.name}.ml.job:train", (), {}, 2)
    shipped = pack.build(f"{namespace.name}.ml.job:train", (), {}).modules.zipped
    assert shipped
    assert f"{namespace.name}/ml/conf.json".encode() in shipped
    assert b"notes.txt" not in shipped
    edited(namespace / "ml" / "conf.json", "0.1", "0.2")
    after = identity_of(f"{namespace.name}.ml.job:train", (), {}, 2)
    assert compare(before, after).differing == (f"module {namespace.name} (data files)",)


@pytest.mark.parametrize("query", ["SELECT 1 AS x", "\n  SELECT 1 AS x\n"])
def test_a_query_that_the_driver_computes_counts_anew_for_each_chain_of_tries(query: str) -> None:
    launcher = Launcher(1, engine=SparkEngine(master="local[1]"), dataset=query)
    chains = ("", "try of a user", "clear of a user")
    parts = [identity_by(launcher, print_it, (1,), {}, generation=chain) for chain in chains]
    assert parts == [identity_by(launcher, print_it, (1,), {}, generation=chain) for chain in chains]
    assert len({each["dataset train"] for each in parts}) == 3


# -- functions whose name in their module belongs to a wrapper ---------------------------------


DECORATED = """
import random, threading
import {name}_rates
from rankzero import distributed

OF_THIS_PROCESS = {made}

@distributed(num_processes=1)
def train(lr):
    return {name}_rates.RATE * lr, OF_THIS_PROCESS
"""


@pytest.mark.parametrize("made", ["random.random()", "threading.Lock()"])
def test_a_distributed_function_counts_by_its_name_and_its_modules(helper: Path, made: str) -> None:
    (helper.parent / f"{helper.stem}_job.py").write_text(DECORATED.format(name=helper.stem, made=made))
    module = load_module(f"{helper.stem}_job")
    before = identity_by(Launcher(1), module.train, (0.1,), {})
    # Another process draws another number and makes another lock, too.
    importlib.reload(module)
    assert identity_by(Launcher(1), module.train, (0.1,), {}) == before
    edited(helper.with_name(f"{helper.stem}_rates.py"), "RATE = 2", "RATE = 3")
    after = identity_by(Launcher(1), module.train, (0.1,), {})
    assert compare(before, after).differing == (f"module {helper.stem}_rates",)


def test_an_option_and_a_positional_argument_of_one_name_both_count() -> None:
    def train(x: int, /, **options: int) -> None: ...

    calls = [digest_of_parts(identity_of(train, (x,), {"x": option}, 1)) for x, option in ((1, 5), (2, 5), (1, 6))]
    assert len(set(calls)) == 3
