"""Measures the size of the code and what one local run touches, and prints the numbers as a table.

``python scripts/measure_house.py`` prints the table. With ``--list`` it also names the files, threads, constants and
imports that it has counted. The run has two ranks and no warm server, and is traced in every process with
`sys.setprofile`; only the guard of the agent, which runs without `site`, is not.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/rankzero"
ORCHESTRATORS = (ROOT / "airflow_provider", ROOT / "dagster_integration")
PUBLIC = {"rankzero", "rankzero.pipeline", "rankzero.errors", "rankzero.tracking"}

FOLDER = "RANKZERO_TRACE"
"""The variable that names the folder in which each traced process writes its file."""

PROGRAM = """
from rankzero import Launcher
def nothing(): return 0
if __name__ == "__main__":
    Launcher(2, store={store!r}, warm_start=False, start_timeout=240).run(nothing)
"""

OF_TIME = re.compile(
    r"(^|_)(TIMEOUT|INTERVAL|PATIENCE|GRACE|WAIT|DELAY|PAUSE|AFTER|AGE|PERIOD|LEASE|DEADLINE|SECONDS|OUTAGE|EVERY|SLACK|SKEW"
    r"|NOTICE|PACE|TICK|WINDOW|WITHIN|POLL)(_|$)"
)
"""Parts of the name of a constant that is a time, unless its docstring names another unit."""

OTHER_UNIT = re.compile(
    r"\b(bytes|lines|number|share|part|times|polls|characters|runs|rows|messages|days|hours|name|records|steps)\b", re.I
)


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


def constants_of_seconds() -> Iterator[str]:
    """Yields each constant of a module outside of bounds.py that is a time in seconds, by its docstring or its name."""
    for path in sources(CORE):
        body = ast.parse(path.read_text()).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if not isinstance(target, ast.Name) or not target.id.isupper() or value is None or not _is_number(value):
                continue
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value).split("\n\n")[0]
            is_time = re.match(r"(\w+ ){0,4}seconds\b", text, re.I) or (
                OF_TIME.search(target.id) and not OTHER_UNIT.search(text)
            )
            if is_time and path.name != "bounds.py":
                yield f"{path.relative_to(CORE)}: {target.id}"


def _is_number(node: ast.expr) -> bool:
    """Returns True for a number, and for an expression of numbers and constants."""
    names = [part for part in ast.walk(node) if isinstance(part, (ast.Call, ast.Subscript, ast.Attribute, ast.Tuple))]
    found = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return not names and bool(found) and all(type(part.value) in (int, float) for part in found)


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


def main(arguments: list[str]) -> None:
    """Prints the table."""
    files, functions, threads = traced_run()
    modules = sources(CORE)
    longest = max(modules, key=length)
    constants, imports = list(constants_of_seconds()), sorted(set(internal_imports()))
    prose = prose_counts()
    rows = [
        ("lines of core", f"{sum(map(length, modules)):,}", "35,000"),
        ("modules of core", len(modules), 200),
        ("files of ours that one local run touches", len(files), 70),
        ("functions of ours that one local run calls", len(functions), 480),
        ("threads of it that run our code", sum(map(len, threads.values())), "-"),
        ("processes of it", len(threads), "-"),
        (f"longest file ({longest.relative_to(CORE)})", length(longest), 400),
        ("internal modules that the orchestrator packages import", len(imports), 0),
        ("docstrings that begin with an anaphor", prose["anaphor"], 20),
        ("docstrings of three words or fewer", prose["short"], 20),
        ("private words in code and docs", prose["private word"], 20),
        ("constants of seconds outside bounds.py", len(constants), 5),
        ("lines of the Airflow and Dagster packages", f"{sum(map(length, sources(*ORCHESTRATORS))):,}", "5,600"),
        ("warm launch over the floor, as last measured", warm_launch(), 1.4),
    ]
    print("| | today | at most |", "|---|---|---|", *("| {} | {} | {} |".format(*row) for row in rows), sep="\n")
    if "--list" in arguments:
        print("\nfiles:", *sorted(files), sep="\n  ")
        print("threads:", *(f"{process}: {', '.join(names)}" for process, names in threads.items()), sep="\n  ")
        print("constants of seconds:", *constants, sep="\n  ")
        print("internal imports:", *imports, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
