"""Compares the public names with those of the last release: python scripts/check_api.py.

A name that was removed, or whose signature changed so that a caller may break, needs a line in the CHANGELOG above that
release. The last release is the newest tag ``v*``; without one there is nothing to compare.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent

MODULES = {
    "core": [
        "rankzero",
        "rankzero.train",
        "rankzero.sweep",
        "rankzero.tracking",
        "rankzero.testing",
        "rankzero.pipeline",
    ],
    "airflow_provider": ["airflow_rankzero"],
    "dagster_integration": ["dagster_rankzero"],
}
"""The modules whose ``__all__`` is public, by the folder of their package.

The names of `rankzero.compat` are those of the libraries that it replaces.
"""


def last_release(root: Path) -> str | None:
    """Returns the newest release tag that the current commit has in its history; None if there is none."""
    asked = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    done = subprocess.run(asked, cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or None


def unexplained(root: Path, release: str, modules: Mapping[str, list[str]]) -> list[str]:
    """Returns a line for each incompatible change since a release of which the CHANGELOG has no word."""
    since = (root / "CHANGELOG.md").read_text().partition(f"## [{release.removeprefix('v')}]")[0]
    found = set()
    for folder, names in modules.items():
        package = names[0]
        before = griffe.load_git(package, ref=release, repo=root, search_paths=[folder], resolve_aliases=True)
        now = griffe.load(package, search_paths=[str(root / folder)], resolve_aliases=True)
        public = {path for name in names for path in _exported(before, name.removeprefix(package).lstrip("."))}
        found |= {
            breakage.explain(griffe.ExplanationStyle.ONE_LINE)
            for breakage in griffe.find_breaking_changes(before, now)
            if _is_below(breakage.obj.path, public) and not _is_named(breakage.obj.path, since)
        }
    return sorted(found)


def _exported(package: griffe.Object | griffe.Alias, module: str) -> set[str]:
    """Returns the paths of the names in a module's ``__all__``, there and where they are defined."""
    of_module = package[module] if module else package
    names = [of_module.members[str(name)] for name in of_module.exports or []]
    return {path for name in names for path in (name.path, name.canonical_path)}


def _is_below(path: str, public: set[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in public)


def _is_named(path: str, changes: str) -> bool:
    """Returns True if the changes name the object, as ``run`` or as ``Launcher.run``."""
    *_, owner, name = path.split(".")
    return f"`{name}`" in changes or f"`{owner}.{name}`" in changes


def main() -> None:
    """Exits with a message if there are unexplained changes."""
    release = last_release(ROOT)
    if release is None:
        print("no release is tagged yet: there is nothing to compare the public names with")
        return
    if lines := unexplained(ROOT, release, MODULES):
        sys.exit("\n".join([f"changed since {release}, without a line in the CHANGELOG:", *lines]))


if __name__ == "__main__":
    main()
