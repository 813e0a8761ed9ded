"""What of the user's modules travels: what imports see, and what only a look at the whole package finds."""

from __future__ import annotations

import importlib.machinery
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_module
from tests.tries.identities import identity_of

from rankzero import Launcher, WorkerFailedError
from rankzero.submit import pack


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


def files_of(built: pack.Payload) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(built.modules.zipped)).namelist()) if built.modules.zipped else set()


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "statement",
    [
        "import zoo.small",
        "def count():\n\tif True:\n\t\tfrom zoo.small import (\n\t\t\tSIZE, # a comment\n)",
        "class Shop:\r\n  import zoo.small as size # of the shop",
    ],
)
def test_a_package_that_a_module_of_another_package_imports_travels(project: Path, statement: str) -> None:
    write(project / "zoo" / "__init__.py")
    write(project / "zoo" / "small.py", "SIZE = 1")
    write(project / "shop" / "__init__.py", "from . import prices\n")
    write(project / "shop" / "prices.py", "from shop.goods import GOODS\nimport json, os\n")
    (project / "shop" / "goods.py").write_bytes(f"GOODS = 1\n{statement}\n".encode())
    write(project / "job.py", "import shop\ndef train():\n    return shop.prices\n")
    found = files_of(pack.build(load_module("job").train, (), {}))
    assert {"zoo/small.py", "shop/goods.py", "shop/prices.py"} <= found


@pytest.mark.parametrize(
    "expression",
    [
        "f'zoo.{kind}'",
        "'zoo.' + kind",
        "'zoo.%s' % kind",
        "'zoo.{}'.format(kind)",
        "'zoo.small'",
        "'zoo'",
        "['a', 'b', 'zoo.small'][2]",
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
    assert {"zoo/__init__.py", "zoo/small.py"} <= files_of(pack.build(train, (), {}))
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
        # Python itself writes the compiled form there.
        found = [path for path in sent.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        return {str(path.relative_to(sent)): path.read_bytes() for path in found}

    assert launcher.options(num_processes=1).run(train) == files


@pytest.mark.parametrize("kind", ["function", "script"])
def test_a_package_that_appears_between_two_submissions_travels(project: Path, kind: str) -> None:
    path = write(project / "job.py", "def train():\n    import zoo\n    return zoo\n")
    train = load_module("job").train if kind == "function" else str(path)
    own = {"job.py"} if kind == "function" else set()
    before = identity_of(train, (), {}, 1)
    assert files_of(pack.build(train, (), {})) == own
    write(project / "zoo" / "__init__.py")
    assert files_of(pack.build(train, (), {})) == {*own, "zoo/__init__.py"}
    assert identity_of(train, (), {}, 1) != before


def test_a_name_that_nobody_can_know_fails_with_what_to_do(launcher: Launcher, project: Path) -> None:
    write(project / "plugin.py", "SIZE = 1")

    def train(name: str) -> int:
        return int(load_module(name[::-1]).SIZE)

    with pytest.raises(WorkerFailedError, match="No module named 'plugin'.*Write `import plugin` in"):
        launcher.options(num_processes=1).run(train, "nigulp")


async def asynchronous() -> None: ...


def test_what_turns_out_to_be_async_fails_with_what_to_do(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match=r"nothing has run yet.*asyncio.run"):
        launcher.options(num_processes=1).run(lambda: asynchronous())


def test_what_may_hold_secrets_stays(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(project / "acme" / "__init__.py", "def train():\n    return 1\n")
    stay = {"webserver_config.py", "secrets/token.txt", "deep/credentials/inner/gcp.json"}
    travel = {"__init__.py", "secrets.py", "inner/secrets/sub/vault.py"}
    for name in stay | travel - {"__init__.py"}:
        write(project / "acme" / name)
    assert files_of(pack.build(load_module("acme").train, (), {})) == {f"acme/{name}" for name in travel}
    assert "acme/deep/credentials/inner/gcp.json, acme/secrets/token.txt, acme/webserver_config.py' do" in caplog.text


def test_an_extension_module_travels_once_and_counts(project: Path) -> None:
    name = f"fastops{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    write(project / name, "1")
    write(project / "job.py", "def train():\n    import fastops\n")
    train = load_module("job").train
    assert files_of(pack.build(train, (), {})) == {"job.py", name}
    before = identity_of(train, (), {}, 1)
    write(project / name, "22")
    assert identity_of(train, (), {}, 1) != before
