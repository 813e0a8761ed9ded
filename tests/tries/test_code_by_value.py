"""Code that is pickled by value counts apart from the values that refer to it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_module
from tests.tries.identities import identity_of

from rankzero.run.identity import compare, digest_of_parts

IMPORTS_AIRFLOW = "if not __name__:\n    import airflow\n"
"""Makes rankzero pickle a module by value, since executors have no Airflow, and imports nothing."""

COMMON = f"""{IMPORTS_AIRFLOW}
import functools

FACTOR = 2

def scale(x):
    return x * FACTOR

class Model:
    depth = 1

    def forward(self, x):
        return x + 1

def timed(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args) + 0
    return inner
"""

TRAIN = """
def train(lr, model=None):
    return lr
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Writes two modules and imports them; ``COMMON`` in their texts is the name of the first one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"{kind}_{secrets.token_hex(4)}" for kind in ("common", "job")]

    def write(*texts: str) -> list[Any]:
        for name, text in zip(names, texts, strict=True):
            path = tmp_path / f"{name}.py"
            path.write_text(text.replace("COMMON", names[0]))
            # Two edits may fall into one tick of the file system's clock, and be of one size.
            moment = time.time_ns()
            os.utime(path, ns=(moment, moment))
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return [load_module(name) for name in names]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return write


@pytest.mark.parametrize(
    ("how", "old", "new"),
    [
        ("from COMMON import scale\ndef train():\n    return scale(1)\n", "x * FACTOR", "x / FACTOR"),
        ("from COMMON import scale\ndef train():\n    return scale(1)\n", "FACTOR = 2", "FACTOR = 3"),
        ("import COMMON as c\ndef train():\n    return c.scale(1)\n", "x * FACTOR", "x / FACTOR"),
        ("from COMMON import Model\ndef train():\n    return Model()\n", "x + 1", "x + 2"),
        ("from COMMON import Model\nmodel = Model()\ndef train():\n    return model\n", "depth = 1", "depth = 2"),
        ("from COMMON import timed\n@timed\ndef train():\n    return 1\n", "(*args) + 0", "(*args) + 1"),
        ("from COMMON import Model\ndef train(model=Model()):\n    return 1\n", "x + 1", "x + 2"),
    ],
    ids=["function", "constant", "module", "class", "object", "decorator", "default"],
)
def test_a_deployed_module_that_imports_an_orchestrator_ends_no_training(
    written: Callable[..., list[Any]], how: str, old: str, new: str
) -> None:
    def identity(common: str, job: str) -> Any:
        return identity_of(written(common, IMPORTS_AIRFLOW + job)[1].train, (), {}, 2)

    assert old in COMMON
    before, deployed = identity(COMMON, how), identity(COMMON.replace(old, new), how)
    again = identity(f"\n# A comment\n{COMMON}\nUNRELATED = 1\n", how)
    compared = compare(before, deployed)
    assert compare(before, deployed, automatic=True).ignored == compared.differing == ("train",)
    # A module object counts with all of its source.
    assert compare(before, again).same or "import COMMON" in how
    edited = identity(COMMON, how.replace("return ", "return not "))
    assert compare(before, edited).differing == compare(before, edited, automatic=True).ignored == ("train",)


def test_an_argument_s_class_counts_for_the_argument_as_its_values_do(written: Callable[..., list[Any]]) -> None:
    def identity(common: str, depth: int = 1, version: str | None = None) -> Any:
        module, job = written(common, TRAIN)
        model = module.Model()
        model.width = depth
        return identity_of(job.train, (0.1, model), {}, 2, version)

    for version in (None, "1"):
        before = identity(COMMON, version=version)
        for other in (identity(COMMON.replace("x + 1", "x + 2"), version=version), identity(COMMON, 2, version)):
            assert compare(before, other, automatic=True).differing == ("argument model",)
        assert identity(f"# A comment\n{COMMON}\nOTHER = 1\n", version=version) == before


def test_an_object_counts_the_same_after_the_cell_of_its_class_has_run_again(written: Callable[..., list[Any]]) -> None:
    cell = "class Config:\n    def __init__(self, lr): self.lr = lr\n"
    job = written("", IMPORTS_AIRFLOW + cell + TRAIN)[1]
    config = job.Config(0.1)
    before = identity_of(job.train, (0.1, config), {}, 2)
    exec(cell, vars(job))
    assert type(config) is not job.Config
    assert identity_of(job.train, (0.1, config), {}, 2) == before


def test_a_function_that_is_made_for_an_argument_counts_whatever_the_version_of_the_code() -> None:
    def train(loss: Callable[[float], float]) -> None: ...

    def power(exponent: int) -> Callable[[float], float]:
        return lambda x: x**exponent

    losses = [power(1), power(2), lambda x: x + 1, lambda x: x + 2]
    assert len({digest_of_parts(identity_of(train, (loss,), {}, 1, "1")) for loss in losses}) == len(losses)


def test_modules_by_value_that_refer_to_each_other_count(written: Callable[..., list[Any]]) -> None:
    common = IMPORTS_AIRFLOW + (
        "registry = []\ndef register(f):\n    registry.append(lambda x: f(x))\n    return f\n"
        "def call(x):\n    return [each(x) for each in registry]\n"
    )
    job = IMPORTS_AIRFLOW + (
        "from COMMON import call, register\n@register\ndef step(x):\n    return train and 1\n"
        "def train():\n    return call(1)\n"
    )

    def identity(common: str, job: str) -> Any:
        return identity_of(written(common, job)[1].train, (), {}, 2)

    before = identity(common, job)
    assert identity(common, job) == before
    assert compare(before, identity(common, job.replace("and 1", "and 2"))).differing == ("train",)
    for old, new in (("f(x)", "f(x + 1)"), ("each(x)", "each(x + 1)")):
        compared = compare(before, identity(common.replace(old, new), job), automatic=True)
        assert compared.same
        assert len(compared.ignored) == 1


def test_a_module_with_a_made_up_name_counts_whatever_its_name(
    written: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Airflow loads DAG files so, with a digest of the file's path in the name of the module.
    job = written("", TRAIN)[1]
    identities = []
    for version in ("1", "2"):
        path = tmp_path / version / "dag_of_models.py"
        path.parent.mkdir()
        path.write_text("class Model:\n    depth = 1\n")
        name = f"made_up_{secrets.token_hex(4)}_dag_of_models"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        identities.append(identity_of(job.train, (0.1, functools.partial(module.Model)), {}, 2))
    assert identities[0] == identities[1]
