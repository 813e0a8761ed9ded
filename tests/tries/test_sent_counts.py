"""What is sent counts: a rerun continues only if nothing that would be sent has changed."""

from __future__ import annotations

import importlib
import linecache
import marshal
import os
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_module
from tests.tries.identities import identity_of

from rankzero import Launcher
from rankzero.run.identity import compare
from rankzero.submit.code import digest_of_source
from rankzero.submit.pack import build

ORCHESTRATED = "if not __name__:\n    import airflow\n"  # Makes a module travel by value, as a DAG file does


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the user's, on the search path of this process."""
    root = tmp_path / "src" / f"acme_{secrets.token_hex(4)}"
    write(root / "__init__.py", "")
    write(root / "models.py", "VERSION = 1\nclass Net:\n    VERSION = VERSION\n")
    write(root / "other.py", "SIZE = 1\n")
    monkeypatch.syspath_prepend(str(root.parent))
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    # Two edits may fall into one tick of the file system's clock, and be of one size.
    moment = time.time_ns()
    os.utime(path, ns=(moment, moment))
    importlib.invalidate_caches()
    return path


def defined(text: str, name: str = "train") -> Any:
    """Returns a function as of a notebook: it travels by value, and has no file."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(text, scope)
    return scope[name]


REACHED = {
    "an argument": ("importlib.import_module(target)", lambda name: f"{name}.models"),
    "a computed name": ("PACKAGE and importlib.import_module('.'.join(target))", lambda name: [name, "models"]),
    "a configuration": (
        "importlib.import_module(target['_target_'].rpartition('.')[0]).Net",
        lambda name: {"_target_": f"{name}.models.Net", "lr": 0.1},
    ),
}


@pytest.mark.parametrize("how", REACHED)
def test_new_code_that_no_statement_imports_counts_and_travels(package: Path, how: str) -> None:
    text, target = REACHED[how]
    imports = f"import importlib\nimport {package.name}\n"
    train = defined(f"{imports}def train(target):\n    return ({text}).VERSION\n".replace("PACKAGE", package.name))
    given = target(package.name)
    write(package / "models.py", f"{ORCHESTRATED}VERSION = 1\n")
    before = identity_of(train, (given,), {}, 1)
    write(package / "models.py", f"{ORCHESTRATED}VERSION = 2\n")
    assert compare(before, identity_of(train, (given,), {}, 1)).differing == (f"module {package.name}.models",)
    assert f"{package.name}/models.py".encode() in (build(train, (given,), {}).modules.zipped or b"")


@pytest.mark.parametrize("text", ["results.day", "results", "no.such.module"])
def test_a_text_that_names_no_module_sends_nothing(package: Path, text: str) -> None:
    write(package.parent / "results" / "day" / "rows.csv", "1")
    train = defined(f"import importlib\ndef train(path, default={text!r}):\n    importlib.import_module({text!r})\n")
    assert not build(train, (text,), {}).modules.counted


@pytest.mark.parametrize("text", ["{}.models", "{}.models.Net", "{}.models:Net", "{}.other", "{}.NAME"])
def test_a_text_that_names_a_module_counts_with_its_package(package: Path, text: str) -> None:
    write(package / "__init__.py", "NAME = 1\n")
    train = defined("def train(path):\n    return path\n")
    before = identity_of(train, ([{"target": text.format(package.name)}],), {}, 1)
    write(package / "other.py", "SIZE = 2\n")
    after = identity_of(train, ([{"target": text.format(package.name)}],), {}, 1)
    assert compare(before, after).differing == (f"module {package.name}.other",)


def test_many_texts_cost_no_search_for_a_module_each(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            searched.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    train = defined("def train(paths):\n    import pip\n    return paths\n")
    paths = [f"image_{number}.jpg" for number in range(10_000)]
    build(train, ([*paths, f"{package.name}.models"],), {})
    assert package.name in searched
    # setuptools' finder does something in this process when pip is asked for.
    assert not [name for name in searched if name.startswith(("image_", "pip"))]


def test_no_text_of_an_argument_is_in_the_description_of_the_run(launcher: Launcher) -> None:
    train = defined("def train(token, line):\n    return 1\n")
    launcher.options(num_processes=1).run(train, "hunter2", ["hunter2"])
    written = "".join(path.read_text() for path in Path(str(launcher.store)).rglob("*.json"))
    assert "argument token" in written
    assert not [text for text in ("hunter2", marshal.dumps("hunter2", 2)[:8].hex()) if text in written]


def test_a_file_in_another_encoding_counts_by_its_bytes(package: Path) -> None:
    train = defined(f"def train():\n    import {package.name}.models\n")
    (package / "models.py").write_bytes("\n\n\nNAME = 'größe'\n".encode("latin-1"))
    assert f"module {package.name}.models" in identity_of(train, (), {}, 1)


def test_a_source_that_python_warns_of_counts_with_what_it_imports(package: Path) -> None:
    write(package / "models.py", "from . import other\nif 1 is 1:\n    pass\n")
    script = write(package.parent / "train.py", f"import {package.name}.models\nif 1 is 1:\n    pass\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"module {package.name}.other" in identity_of(str(script), (), {}, 1)


# -- a DAG file --------------------------------------------------------------------------------


@pytest.fixture
def dag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Writes a DAG file and imports it again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"dag_{secrets.token_hex(4)}"

    def load(text: str) -> Any:
        write(tmp_path / f"{name}.py", ORCHESTRATED + text)
        sys.modules.pop(name, None)
        return load_module(name)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield load
    sys.modules.pop(name, None)


TASK = """
RATE = 0.1

def retried(number):
    return lambda function: function

def scaled(x):
    return x * RATE

@retried(3)
def train(x):
    # A comment.
    return f"{scaled(x)}"

def make(rate, unit=None):
    def made(x):
        return x * rate
    return made
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("# A comment.", "# Another\n\n    # one.", True),
        ("return x * RATE", "return (\n        x * RATE)", False),
        ("return x * RATE", "return x   *  \\\n  RATE", True),
        ("@retried(3)", "@retried(4)", True),
        ("def make(rate, unit=None):", "OTHER = 1\n\ndef make(rate, unit=1):", True),
        ("RATE = 0.1", "RATE = 0.2", False),
        ('f"{scaled(x)}"', 'f"{scaled(x + 1)}"', False),
        ("return x * RATE", "return x + RATE", False),
    ],
)
def test_a_function_of_a_dag_file_counts_by_its_source_and_what_it_refers_to(
    dag: Callable[[str], Any], old: str, new: str, is_same: bool
) -> None:
    assert old in TASK
    before = identity_of(dag(TASK).train, (1,), {}, 1)
    compared = compare(before, identity_of(dag(TASK.replace(old, new)).train, (1,), {}, 1))
    assert compared.differing == (() if is_same else ("train",))


def test_an_edit_elsewhere_in_a_file_of_a_pipeline_in_a_package_ends_nothing(package: Path) -> None:
    text = "import dagster\nfrom . import models\ndef train():\n    return models.VERSION\n"
    write(package / "pipeline.py", text)
    train = load_module(f"{package.name}.pipeline").train
    before = identity_of(train, (), {}, 1)
    write(package / "pipeline.py", f"{text}def other():\n    return 1\n")
    assert identity_of(train, (), {}, 1) == before
    write(package / "models.py", "def lazily():\n    from . import pipeline\n")
    assert f"module {package.name}.pipeline" in identity_of(train, (), {}, 1)


def test_a_function_counts_by_its_source_whatever_python_makes_of_it(dag: Callable[[str], Any]) -> None:
    with pytest.warns(SyntaxWarning):
        module = dag(TASK.replace("return x * RATE", '"""Scales."""\n    assert x is not 9\n    return x * RATE'))
    program = "from tests.tries.identities import identity_of\n"
    program += f"import {module.__name__} as dag\nprint(identity_of(dag.train, (1,), {{}}, 1))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    digests = {
        subprocess.run(
            [sys.executable, *flags, "-c", program], env=environment, check=True, capture_output=True, text=True
        ).stdout
        # Without assertions and texts: like another version of Python, it makes other instructions of the source.
        for flags in ([], ["-OO"])
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digests == {f"{identity_of(module.train, (1,), {}, 1)}\n"}


def test_code_counts_that_its_file_no_longer_has(dag: Callable[[str], Any], tmp_path: Path) -> None:
    """A notebook's module or a daemon's DAG file is edited while the process keeps what it has imported."""
    module = dag(TASK)
    write(Path(module.__file__), ORCHESTRATED + TASK.replace("x * RATE", "x / RATE"))
    linecache.checkcache()
    kept = identity_of(module.train, (1,), {}, 1)
    assert identity_of(module.train, (1,), {}, 1) == kept
    reloaded = identity_of(dag(TASK.replace("x * RATE", "x / RATE")).train, (1,), {}, 1)
    assert compare(kept, reloaded).differing == ("train",)


def test_a_module_of_which_ranks_get_the_memory_counts_by_that(dag: Callable[[str], Any], launcher: Launcher) -> None:
    module = dag(TASK)
    train = defined("def train():\n    return dag.scaled(2)\n")
    train.__globals__["dag"] = module
    before = identity_of(train, (), {}, 1)
    write(Path(module.__file__), ORCHESTRATED + TASK.replace("RATE = 0.1", "RATE = 0.3"))
    assert identity_of(train, (), {}, 1) == before
    module.RATE = 0.5
    assert launcher.options(num_processes=1).run(train) == 1
    assert compare(before, identity_of(train, (), {}, 1)).differing == ("train",)


def test_an_f_string_is_one_token_in_every_version_of_python() -> None:
    digest = "8d1ff9c21041e526adf18801760f2046ff83c031adaaa321b479413558c44adc"
    assert digest_of_source(b'x = f"{a!r} and {b}" # c\n') == digest
