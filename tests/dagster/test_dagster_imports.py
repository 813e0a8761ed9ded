"""Loading definitions must stay cheap: every code server and step process does it."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import dagster_rankzero


def test_the_package_imports_no_heavy_library() -> None:
    program = (
        # As the dg command does: every name is looked at.
        "import sys, dagster, dagster_rankzero\n"
        "before = set(sys.modules)\n"
        "[getattr(dagster_rankzero, name) for name in dir(dagster_rankzero)]\n"
        "heavy = ('torch', 'pyspark', 'numpy', 'pandas', 'airflow', 'matplotlib', 'upath', 's3fs')\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_dagster_knows_the_library() -> None:
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        "import dagster_rankzero\n"
        "from dagster_shared.libraries import DagsterLibraryRegistry\n"
        "assert DagsterLibraryRegistry.get()['dagster-rankzero'] == dagster_rankzero.__version__"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_rooms_build_on_each_other_without_a_circle() -> None:
    root = Path(dagster_rankzero.__file__).parent
    graph: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        # Lazy imports count, too: a room that needs another later needs it.
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dagster_rankzero"):
                below = (node.module or "").split(".")[1:] or [name.name for name in node.names]
                graph.setdefault(room, set()).update({below[0]} - {room})
    list(graphlib.TopologicalSorter(graph).static_order())
    assert "resource" in graph["decorators"]
