"""Counts the imports in tests that name a module inside a room, and fails if there are more than `LIMIT`.

Tests import a room through its package (``from rankzero.run import RunDirectory``), so that a file can be moved within
its room. Only a test that replaces an attribute of a module, or reads private names, needs the module itself.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOTS = {
    "rankzero": ROOT / "core",
    "airflow_rankzero": ROOT / "airflow_provider",
    "dagster_rankzero": ROOT / "dagster_integration",
}

LIMIT = 160
"""The number of such imports. A change that needs more of them should export a name from its room instead."""

PUBLIC = {
    "airflow_rankzero.hooks.rankzero",
    "rankzero.compat.deepspeed_distributor",
    "rankzero.compat.horovod.spark",
    "rankzero.compat.ray_train.session",
    "rankzero.compat.ray_train.torch",
    "rankzero.compat.ray_train.train",
    "rankzero.compat.torch_distributor",
}
"""Modules that users import by their addresses. Packages are rooms, and may be imported."""


def is_internal(module: str) -> bool:
    """Returns True if a module is a file inside a room of one of the three packages, and is not public."""
    first, *rest = module.split(".")
    # core's errors, job and the like are files and rooms at the same time.
    depth = 1 if first == "rankzero" else 0
    return (
        first in ROOTS
        and len(rest) > depth
        and module not in PUBLIC
        and ROOTS[first].joinpath(first, *rest).with_suffix(".py").is_file()
    )


def internal_imports(code: str) -> list[tuple[int, str]]:
    """Returns the line and the module of each import that names a module inside a room."""
    named: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            named += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            named += [(node.lineno, module) for module in sorted({node.module} | members)]
    return [(line, module) for line, module in named if is_internal(module)]


def main() -> int:
    """Prints the number of such imports beside the limit, and each of them if the limit is exceeded."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, module in internal_imports(path.read_text())
    ]
    if len(found) > LIMIT:
        print(*found, sep="\n")
    print(f"tests have {len(found)} imports of modules inside rooms; the limit is {LIMIT}")
    return int(len(found) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
