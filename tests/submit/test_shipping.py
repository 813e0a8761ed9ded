"""What of the user's modules travels: what imports see, and what only a look at the whole package finds."""

from __future__ import annotations

import functools
import importlib
import io
import marshal
import os
import py_compile
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_module

from rankzero import InvalidJobError, Launcher, WorkerFailedError
from rankzero.submit import identity_of, payload


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path; its modules are forgotten after the test."""
    before = set(sys.modules)
    folder = tmp_path / "src"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if not name.startswith(("rankzero", "torch")):
            del sys.modules[name]


def files_of(built: payload.Payload) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(built.modules.data)).namelist()) if built.modules else set()


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "statement",
    [
        "import zoo.small",
        "import os, zoo . small as size",
        "import os, \\\n  zoo.small",
        "from \\\n  zoo import small",
        "from zoo . small import SIZE",
        "import os; import zoo.small",
        "try: import zoo.small\nexcept ImportError: pass",
        "def count():\n\tif True:\n\t\tfrom zoo.small import (\n\t\t\tSIZE, # a comment\n)",
        "if 'import' == 'from': import zoo.small",
        "class Shop:\r\n  import zoo.small as size # of the shop",
    ],
)
def test_a_package_that_a_module_of_another_package_imports_travels(project: Path, statement: str) -> None:
    """Most modules are not parsed, so every way to write an import is tried."""
    write(project / "zoo" / "__init__.py")
    write(project / "zoo" / "small.py", "SIZE = 1")
    write(project / "shop" / "__init__.py", "from . import prices\n")
    write(project / "shop" / "prices.py", "from shop.goods import GOODS\nimport json, os\n")
    (project / "shop" / "goods.py").write_bytes(f"GOODS = 1\n{statement}\n".encode())
    write(project / "job.py", "import shop\ndef train():\n    return shop.prices\n")
    found = files_of(payload.build(load_module("job").train, (), {}))
    assert {"zoo/small.py", "shop/goods.py", "shop/prices.py"} <= found


@pytest.mark.parametrize(
    "expression",
    [
        "f'zoo.{kind}'",
        "'zoo.' + kind",
        "'zoo.%s' % kind",
        "'zoo.{}'.format(kind)",
        "'zoo.small'",
    ],
)
@pytest.mark.parametrize("place", ["module", "function"])
def test_a_package_with_which_a_computed_name_begins_travels(project: Path, expression: str, place: str) -> None:
    write(project / "zoo" / "__init__.py")
    small = write(project / "zoo" / "small.py", "SIZE = 1")
    source = f"import importlib\ndef train(kind='small'):\n    return importlib.import_module({expression}).SIZE\n"
    if place == "module":
        write(project / "computing.py", source)
        train = load_module("computing").train
    else:
        # As a notebook's: it travels by value, and has no source that anybody reads.
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(source, scope)
        train = scope["train"]
    assert {"zoo/__init__.py", "zoo/small.py"} <= files_of(payload.build(train, (), {}))
    before = identity_of(train, (), {}, 1)
    small.write_text("SIZE = 22")
    assert identity_of(train, (), {}, 1) != before


def test_each_file_of_a_package_arrives_unchanged(launcher: Launcher, project: Path) -> None:
    files = {
        "__init__.py": b"",
        "größe.txt": b"1",
        "inner/deep/table.bin": b"PK\3\4" * 20_000,
        "inner/empty.bin": b"",
        "z.bin": b"PK\5\6\0",
    }
    for name, data in files.items():
        write(project / "zoo" / name).write_bytes(data)

    def train() -> dict[str, bytes]:
        import zoo

        sent = Path(zoo.__path__[-1])
        assert sent.parent.name == "modules"
        return {str(path.relative_to(sent)): path.read_bytes() for path in sent.rglob("*") if path.is_file()}

    assert launcher.options(num_processes=1).run(train) == files


@pytest.mark.parametrize("kind", ["function", "script"])
def test_a_package_that_appears_between_two_submissions_travels(project: Path, kind: str) -> None:
    path = write(project / "job.py", "def train():\n    import zoo\n    return zoo\n")
    train = load_module("job").train if kind == "function" else str(path)
    own = {"job.py"} if kind == "function" else set()
    before = identity_of(train, (), {}, 1)
    assert files_of(payload.build(train, (), {})) == own
    write(project / "zoo" / "__init__.py")
    assert files_of(payload.build(train, (), {})) == {*own, "zoo/__init__.py"}
    assert identity_of(train, (), {}, 1) != before


def test_following_modules_that_import_each_other_in_many_ways_is_not_exponential(project: Path) -> None:
    def calls(package: str, modules: int) -> int:
        write(project / package / "__init__.py")
        for number in range(modules):
            imports = [f"import {package}.layer{below}\n" for below in range(number)]
            write(project / package / f"layer{number}.py", "".join(imports) + "def train(): pass\n")
        train = load_module(f"{package}.layer{modules - 1}").train
        count = 0

        def on_event(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(on_event)
        try:
            payload.build(train, (), {})
        finally:
            sys.setprofile(None)
        return count

    assert calls("deep", 16) < 10 * calls("flat", 4)


def test_a_name_that_nobody_can_know_fails_with_what_to_do(launcher: Launcher, project: Path) -> None:
    write(project / "plugin.py", "SIZE = 1")

    def train(name: str) -> int:
        return int(load_module(name).SIZE)

    with pytest.raises(WorkerFailedError, match="No module named 'plugin'.*Write `import plugin` in"):
        launcher.options(num_processes=1).run(train, "plugin")


def test_a_subpackage_that_an_editable_install_has_elsewhere_travels(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = pytest.importorskip("setuptools.command.editable_wheel")
    package, parts = tmp_path / "main" / "acme", tmp_path / "other" / "parts"
    write(package / "__init__.py")
    write(package / "train.py", "from acme.parts import wheel\ndef train(): return wheel.SIZE\n")
    write(parts / "__init__.py")
    write(parts / "wheel.py", "SIZE = 4")
    # What `pip install --editable` writes of package_dir={"acme": "main/acme", "acme.parts": "other/parts"}.
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    scope: dict[str, Any] = {"__name__": "__editable___acme_finder"}
    exec(editable._finder_template("acme", {"acme": str(package), "acme.parts": str(parts)}, {}), scope)
    scope["install"]()
    train = load_module("acme.train").train
    wanted = {"acme/__init__.py", "acme/train.py", "acme/parts/__init__.py", "acme/parts/wheel.py"}
    assert files_of(payload.build(train, (), {})) == wanted
    before = identity_of(train, (), {}, 1)
    write(parts / "wheel.py", "SIZE = 55")
    assert identity_of(train, (), {}, 1) != before


@pytest.fixture
def by_hand() -> Iterator[Any]:
    module = types.ModuleType("made_by_hand")
    exec("SIZE = 7\ndef size(): return SIZE\nclass Net:\n    size = 7\n", module.__dict__)
    sys.modules["made_by_hand"] = module
    yield module
    del sys.modules["made_by_hand"]


def test_what_is_in_a_module_made_by_hand_travels_by_value(launcher: Launcher, by_hand: Any) -> None:
    def train(net: Any) -> list[int]:
        return [net.size, by_hand.size(), by_hand.Net.size]

    launcher = launcher.options(num_processes=1)
    assert launcher.run(train, by_hand.Net()) == [7, 7, 7]
    assert launcher.run(by_hand.size) == 7


def test_a_function_that_imports_a_module_made_by_hand_is_refused(by_hand: Any) -> None:
    def train() -> int:
        import made_by_hand  # type: ignore[import-not-found]

        return int(made_by_hand.SIZE)

    with pytest.raises(InvalidJobError, match="imports made_by_hand, a module that was made by hand"):
        payload.build(train, (), {})


@pytest.mark.soak
def test_a_function_that_torch_has_compiled_is_refused_with_what_to_do() -> None:
    import torch

    def step(x: float) -> float:
        return 2 * x

    compiled = torch.compile(step)
    for train in (compiled, lambda x: compiled(x)):
        with pytest.raises(InvalidJobError, match="step was compiled by torch.compile.* inside of the training"):
            payload.build(train, (1.0,), {})


async def asynchronous() -> None: ...


async def asynchronous_items() -> Any:
    yield 1


class Asynchronous:
    async def __call__(self) -> None: ...

    async def method(self) -> None: ...


@pytest.mark.parametrize(
    "train",
    [
        asynchronous,
        asynchronous_items,
        functools.partial(asynchronous),
        functools.partial(functools.partial(Asynchronous())),
        Asynchronous(),
        Asynchronous().method,
    ],
)
def test_an_async_function_is_refused_before_anything_starts(train: Any) -> None:
    with pytest.raises(InvalidJobError, match="is an async function; ranks call plain functions"):
        payload.build(train, (), {})


def test_what_turns_out_to_be_async_fails_with_what_to_do(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match=r"nothing has run yet.*asyncio.run"):
        launcher.options(num_processes=1).run(lambda: asynchronous())


def test_a_loaded_module_below_an_ignored_folder_stays(project: Path) -> None:
    write(project / "acme" / "__init__.py")
    write(project / "acme" / "train.py", "def train():\n    return 1\n")
    write(project / "acme" / "private" / "__init__.py")
    write(project / "acme" / "private" / "plans.py")
    write(project / "acme" / ".rankzeroignore", "/private/\n")
    load_module("acme.private.plans")
    built = payload.build(load_module("acme.train").train, (), {})
    assert files_of(built) == {"acme/__init__.py", "acme/train.py"}
    assert built.modules
    assert "left out  acme/private/plans\n" in built.modules.listing


def test_a_module_of_another_script_with_the_same_name_is_no_edited_one(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project / "helper.py", "SIZE = 1\n")
    launcher = Launcher(1, store=tmp_path / "store")
    load_module("helper")
    for number in range(2):
        script = write(tmp_path / f"scripts-{number}" / "train.py", "import helper\n")
        write(script.parent / "helper.py", f"SIZE = {number + 2}\n")
        launcher.run(str(script))
    assert "changed on the disk" not in caplog.text


def test_a_module_that_was_edited_before_its_first_submission_is_named(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(project / "edited_early.py", "def train():\n    return 1\n")
    module = importlib.import_module("edited_early")
    write(project / "edited_early.py", "def train():\n    return 22\n")
    for _ in range(2):
        caplog.clear()
        assert Launcher(1, store=tmp_path / "store").run(module.train) == 22
        assert "edited_early: changed on the disk since this process imported it" in caplog.text
    caplog.clear()
    importlib.reload(module)
    Launcher(1, store=tmp_path / "store").run(module.train)
    assert "changed on the disk" not in caplog.text


def test_a_module_that_was_edited_and_not_reloaded_is_named(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project / "edited.py", "def train():\n    return 1\n")
    launcher = Launcher(1, store=tmp_path / "store")
    module = load_module("edited")
    assert launcher.run(module.train) == 1
    write(project / "edited.py", "# A comment is no change.\ndef train():\n    return 1\n")
    launcher.run(module.train)
    assert "changed on the disk" not in caplog.text
    write(project / "edited.py", "def train():\n    return 22\n")
    assert launcher.run(module.train) == 22
    assert "edited: changed on the disk since this process imported it" in caplog.text
    caplog.clear()
    importlib.reload(module)
    launcher.run(module.train)
    assert "changed on the disk" not in caplog.text


def test_ranks_use_the_compiled_form_of_what_was_sent_if_it_can_be_of_no_other_source(
    project: Path, launcher: Launcher
) -> None:
    """The compiled forms lie, so that a rank tells which ones it has used."""
    begin = time.time()
    later = {"settled": 60.0, "just_changed": 1.0, "set_back": 1.0, "damaged": 60.0, "edited": 60.0}
    for name, seconds in later.items():
        source = write(project / f"{name}_here.py", "VALUE = 'source'\n")
        if name == "set_back":
            os.utime(source, (1e9, 1e9))
        compiled = Path(py_compile.compile(str(source), doraise=True))
        content = marshal.dumps(compile("VALUE = 'compiled'\n", str(source), "exec"))
        compiled.write_bytes(compiled.read_bytes()[:16] + content[: 20 if name == "damaged" else None])
        os.utime(compiled, (begin + seconds, begin + seconds))
    # Of the same length and second: only the bytes differ from those that were sent.
    text = f"""
import {", ".join(f"{name}_here" for name in later if name not in ("damaged", "edited"))}

def train():
    import os
    from pathlib import Path

    other = Path(settled_here.__file__).with_name("edited_here.py")
    before = os.stat(other)
    other.write_text("VALUE = 'edited'\\n")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    import damaged_here
    import edited_here
    return [module.VALUE for module in (settled_here, just_changed_here, set_back_here, damaged_here, edited_here)]
"""
    write(project / "train_here.py", text)
    train: Any = importlib.import_module("train_here")
    assert launcher.options(num_processes=1).run(train.train) == ["compiled", "source", "source", "source", "source"]
    assert (project / "edited_here.py").read_text() == "VALUE = 'edited'\n"


REACHING = """
import acme_here

def by_attribute(package):
    return acme_here.sub.VALUE

def by_text(package):
    return getattr(acme_here, "sub").VALUE

def by_computed_name(package):
    return getattr(acme_here, "bus"[::-1]).VALUE

def by_an_import(package):
    import acme_here as here
    return here.sub.VALUE

def by_an_import_of_another(package):
    import acme_here.other
    return acme_here.sub.VALUE

def by_an_argument(package):
    return package.sub.VALUE
"""


@pytest.mark.parametrize("travels", ["by name", "by value"])
def test_ranks_import_what_the_caller_has_loaded_below_a_package(
    launcher: Launcher, project: Path, travels: str
) -> None:
    for name in ("__init__", "other"):
        write(project / "acme_here" / f"{name}.py")
    write(project / "acme_here" / "sub.py", "VALUE = 7\n")
    # Loaded here, and of no use to the function; importing it fails in ranks.
    write(project / "acme_here" / "of_the_caller.py", f"import os\nassert os.getpid() == {os.getpid()}\n")
    write(project / "reaching_here.py", REACHING)
    for name in ("sub", "other", "of_the_caller"):
        importlib.import_module(f"acme_here.{name}")
    package: Any = importlib.import_module("acme_here")
    if travels == "by name":
        found = vars(importlib.import_module("reaching_here"))
    else:
        found = {"__name__": "__main__"}
        exec(REACHING, found)
    functions = [found[name] for name in found if name.startswith("by_")]
    assert len(functions) == 6
    for function in functions:
        assert function(package) == 7
        assert launcher.options(num_processes=1).run(function, package) == 7


def test_a_submodule_that_is_named_by_a_text_counts(project: Path) -> None:
    write(project / "acme_here" / "__init__.py")
    sub = write(project / "acme_here" / "sub.py", "VALUE = 7\n")
    write(project / "reaching_here.py", REACHING)
    importlib.import_module("acme_here.sub")
    train = importlib.import_module("reaching_here").by_text
    before = identity_of(train, (None,), {}, 1)
    sub.write_text("VALUE = 8\n")
    assert identity_of(train, (None,), {}, 1) != before
