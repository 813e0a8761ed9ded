"""The rooms of core, one for each process that code runs in: the way down is the way of the imports, and no circle."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from tests.conftest import ROOT

CORE = ROOT / "core" / "rankzero"

DOWN = (
    "rankzero",
    "cli",
    "doctor",
    "testing",
    "compat",
    "launcher",
    "sweep",
    "submit",
    "driver",
    "engines",
    "task",
    "warm",
    "agent",
    "worker",
    "train",
    "data",
    "channel",
    "report",
    "tracking",
    "run",
    "values",
    "job",
    "store",
    "host",
    "masking",
    "errors",
    "bounds",
    "texts",
)
"""Each may import what stands after it."""


def modules() -> dict[str, Path]:
    found = {}
    for path in CORE.rglob("*.py"):
        parts = path.relative_to(CORE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of core that one imports, also within functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rankzero":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "rankzero"}
    return found - {name}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "rankzero"


def test_imports_go_down() -> None:
    known = modules()
    assert {room(name) for name in known} == set(DOWN)
    upward = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imports(name, path, known)
        # The package itself: its version, its file. A handle draws its own card where a notebook displays it.
        if (name, other) != ("rankzero.run.handle", "rankzero.report.notebook")
        and other != "rankzero"
        and DOWN.index(room(other)) < DOWN.index(room(name))
    ]
    assert upward == []


def test_no_module_imports_itself_in_a_circle() -> None:
    known = modules()
    graph = {name: imports(name, path, known) & set(known) - {"rankzero"} for name, path in known.items()}
    circles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            circles.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        if name != "rankzero":
            visit(name, [])
    assert circles == []


def test_every_room_says_what_lives_there() -> None:
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in CORE.rglob("__init__.py"))


def test_imports_of_a_file_inside_a_room_are_counted() -> None:
    check = runpy.run_path(str(ROOT / "scripts" / "check_test_imports.py"))
    code = "from rankzero.run.retention import Age\nfrom rankzero.driver import policy\nimport dagster_rankzero.step"
    assert [module for _, module in check["internal_imports"](code)] == [
        "rankzero.run.retention",
        "rankzero.driver.policy",
        "dagster_rankzero.step",
    ]
    rooms = "import rankzero.train as rt\nfrom rankzero.run import Age\nfrom rankzero import Launcher\nimport os.path"
    assert check["internal_imports"](rooms + "\nfrom rankzero.errors import EngineError") == []
