"""Measures the size of the code and what one local run touches, and prints the numbers as a table.

``python scripts/measure_house.py`` prints the table. With ``--list`` it also names the files, threads and imports that
it has counted. ``--check`` runs nothing: it fails if a room is over its limit in ``weight.toml``, or exports a name
that only tests use. The run has two ranks, none of which is a fork, and every process is traced with `sys.setprofile`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/rankzero"
ORCHESTRATORS = (ROOT / "airflow_provider", ROOT / "dagster_integration")
PUBLIC = {"rankzero", "rankzero.pipeline", "rankzero.errors", "rankzero.tracking"}
INTERFACES = {f"rankzero.{room}" for room in ("compat", "sweep", "testing", "tracking", "train")}
"""The packages of core whose names users import."""

FOLDER = "RANKZERO_TRACE"
"""The variable that names the folder in which each traced process writes its file."""

PROGRAM = """
from rankzero import Launcher
def nothing(): return 0
if __name__ == "__main__":
    Launcher(2, store={store!r}, warm_start=False, start_timeout=240).run(nothing)
"""


def trace() -> None:
    """Writes the first call of each function of rankzero, and the thread that makes it; `sitecustomize` calls this."""
    seen: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or "/rankzero/" not in code.co_filename or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        thread = threading.get_ident()
        if not {thread, code} <= seen and not code.co_name.startswith("<"):
            seen.update((thread, code))
            name = threading._active[thread].name if thread in threading._active else "?"  # type: ignore[attr-defined]
            # The folder may be a zip, or the module may be in a copy of the package.
            file = code.co_filename.rpartition("/rankzero/")[2]
            line = json.dumps([file, code.co_qualname, code.co_firstlineno, thread, name]) + "\n"
            descriptor = os.open(f"{os.environ[FOLDER]}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    os.register_at_fork(after_in_child=seen.clear)
    threading.setprofile(note)
    sys.setprofile(note)


def traced_run() -> tuple[set[str], set[tuple[str, str, int]], dict[str, list[str]]]:
    """Runs one local training, and returns the files, the functions, and the names of the threads by process."""
    files, functions, threads = set(), set(), {}
    with tempfile.TemporaryDirectory(prefix="house-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for name in ("hook", "trace"):
            (folder / name).mkdir()
        (folder / "hook/sitecustomize.py").write_text("from measure_house import trace\n\ntrace()\n")
        (folder / "program.py").write_text(PROGRAM.format(store=f"{place}/runs"))
        paths = [str(folder / "hook"), str(ROOT / "scripts"), str(ROOT / "core")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FOLDER: str(folder / "trace")}
        subprocess.run([sys.executable, str(folder / "program.py")], env=environment, check=True)
        for path in sorted((folder / "trace").iterdir()):
            calls = [json.loads(line) for line in path.read_text().splitlines()]
            files |= {call[0] for call in calls}
            functions |= {(call[0], call[1], call[2]) for call in calls}
            threads[path.name] = sorted({call[3]: call[4] for call in calls}.values())
    return files, functions, threads


def sources(*folders: Path) -> list[Path]:
    """Returns the Python files below some folders."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def length(path: Path) -> int:
    """Returns the number of lines of a file."""
    return len(path.read_text().splitlines())


def internal_imports() -> Iterator[str]:
    """Yields each module of core outside of its public interface that a package of an orchestrator imports."""
    for path in sources(*ORCHESTRATORS):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
                if node.module == "rankzero":
                    # A package or module of core that is imported from the package itself.
                    places = [CORE / alias.name for alias in node.names]
                    modules += [f"rankzero.{p.name}" for p in places if p.is_dir() or p.with_suffix(".py").is_file()]
            yield from (module for module in modules if module.split(".")[0] == "rankzero" and module not in PUBLIC)


def prose_counts() -> dict[str, int]:
    """Returns the number of findings of `check_prose` in code and docs, by kind."""
    import check_prose

    roots = [*(ROOT / folder for folder in check_prose.CODE), ROOT / "docs"]
    counts = dict.fromkeys(check_prose.LIMITS, 0)
    for root in roots:
        for path in root.rglob("*"):
            if path.suffix in (".py", ".md"):
                for kind, _, _ in check_prose.findings(path):
                    counts[kind] += 1
    return counts


def warm_launch() -> str:
    """Returns how many times the floor a warm launch takes, of the last ``benchmarks/all.py launch``."""
    with contextlib.suppress(OSError, KeyError, StopIteration, ValueError):
        ratios = json.loads((ROOT / "benchmarks/results.json").read_text())["launch"]["ratios"]
        return f"{next(row['value'] for row in ratios if 'floor' in row['what']):.2f}"
    return "not measured"


def rooms() -> dict[str, int]:
    """Returns the lines of each room of core, of all of core, of the orchestrator packages and of the tests."""
    lines = Counter({"total": 0})
    for path in sources(CORE):
        parts = path.relative_to(CORE).parts
        lines[parts[0] if len(parts) > 1 else "root"] += length(path)
        lines["total"] += length(path)
    for name, folder in (("airflow", ORCHESTRATORS[0]), ("dagster", ORCHESTRATORS[1]), ("tests", ROOT / "tests")):
        lines[name] = sum(map(length, sources(folder)))
    return dict(lines)


def words_of_docs() -> int:
    """Returns the number of words of the pages below docs/."""
    return sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))


def over_limit() -> Iterator[str]:
    """Yields a line for each room that has more than its limit in weight.toml, or that has none."""
    limits = tomllib.loads((ROOT / "scripts/weight.toml").read_text())
    weighed = {"lines": rooms(), "modules": {"core": len(sources(CORE))}, "words": {"docs": words_of_docs()}}
    for unit, found in weighed.items():
        for name, weight in sorted(found.items()):
            if weight > limits[unit].get(name, 0):
                yield f"{name} has {weight:,} {unit} and may have {limits[unit].get(name, 0):,} (scripts/weight.toml)"


def exported_for_tests() -> Iterator[str]:
    """Yields each name that the package of a room exports and that nothing but tests uses."""
    exports: dict[str, set[str]] = {}
    for path in sorted(CORE.glob("*/__init__.py")):
        if (room := f"rankzero.{path.parent.name}") not in INTERFACES:
            tree = ast.parse(path.read_text())
            own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(room):
                    exports.setdefault(room, set()).update({alias.name for alias in node.names} - own)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names":
                    paths = ast.literal_eval(node.args[1]).split()
                    exports.setdefault(room, set()).update(path.rpartition(".")[2] for path in paths)
    used = set()
    folders = (CORE, *ORCHESTRATORS, *(ROOT / name for name in ("scripts", "benchmarks", "example_dags")))
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                used.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                used.add(f"rankzero.{ast.unparse(node)}")
    for room, names in exports.items():
        yield from (f"{room} exports {name} for tests alone" for name in sorted(names) if f"{room}.{name}" not in used)


def check() -> None:
    """Exits with the lines of `over_limit` and `exported_for_tests`, if there are any."""
    found = [*over_limit(), *exported_for_tests()]
    if found:
        sys.exit("\n".join(found))
    print("every room is within its limit of weight, and exports nothing for tests alone")


def main(arguments: list[str]) -> None:
    """Prints the table, or checks the limits."""
    if "--check" in arguments:
        return check()
    files, functions, threads = traced_run()
    modules = sources(CORE)
    longest = max(modules, key=length)
    imports, prose = sorted(set(internal_imports())), prose_counts()
    rows = [
        *((f"lines: {name}", f"{lines:,}") for name, lines in sorted(rooms().items())),
        ("words of docs", f"{words_of_docs():,}"),
        ("modules of core", len(modules)),
        (f"longest file ({longest.relative_to(CORE)})", length(longest)),
        ("files of ours that one local run touches", len(files)),
        ("functions of ours that one local run calls", len(functions)),
        ("threads of it that run our code", sum(map(len, threads.values()))),
        ("processes of it", len(threads)),
        ("internal modules that the orchestrator packages import", len(imports)),
        *((f"prose: {kind}", count) for kind, count in prose.items()),
        ("warm launch over the floor, as last measured", warm_launch()),
    ]
    print("| | today |", "|---|---|", *("| {} | {} |".format(*row) for row in rows), sep="\n")
    if "--list" in arguments:
        print("\nfiles:", *sorted(files), sep="\n  ")
        print("threads:", *(f"{process}: {', '.join(names)}" for process, names in threads.items()), sep="\n  ")
        print("internal imports:", *imports, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
