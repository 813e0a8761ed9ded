"""Hooks of mkdocs: the reference, and files that pages link to, are pages of the site, too.

Numbers come from the results of the benchmarks.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import quotes  # noqa: E402

DOCS = "docs"

PACKAGES = ("core", "airflow_provider", "dagster_integration")
"""Folders of the packages whose docstrings are the reference."""

REFERENCE = "reference"
"""The folder of the reference, whose index is a file of the repository."""

LINK = re.compile(r"(?<=\]\()([^)\s:#]+)")
"""The file of a link."""


def linked(pages: Iterable[str]) -> set[str]:
    """Files outside of docs/ to which these pages lead, also over one another; by their paths in the repository."""
    found: set[str] = set()
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for link in LINK.findall((ROOT / page).read_text()):
            target = _target(page, link)
            if target not in found and not target.startswith(f"{DOCS}/") and (ROOT / target).is_file():
                found.add(target)
                waiting += [target] if target.endswith(".md") else []
    return found


def reference() -> dict[str, str]:
    """Returns the pages of the reference by file name.

    The interpreter that has Airflow and Dagster makes them, without the variables of an Airflow, whose defaults they
    would show.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    clean["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in PACKAGES)
    with tempfile.TemporaryDirectory() as home:
        command = [str(ROOT / ".venv/bin/python"), str(ROOT / "scripts/reference.py"), "--pages"]
        made = subprocess.run(command, env=clean | {"AIRFLOW_HOME": home}, stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(made.stdout)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    from mkdocs.structure.files import File

    for path in sorted(linked(f"{DOCS}/{file.src_uri}" for file in files.documentation_pages())):
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f"# `{path}`\n\n```{path.rpartition('.')[2]}\n{text}```\n"
        files.append(File.generated(config, _page(path), content=text))
    for name, text in reference().items():
        files.append(File.generated(config, f"{REFERENCE}/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads their links, and those to them, to where they are in the site."""
    here = page.file.src_uri
    origin = here if page.file.generated_by else f"{DOCS}/{here}"
    if here == f"{REFERENCE}/README.md":
        # Only the site has the pages of the modules.
        markdown = re.sub(r"^\| `([\w.]+)` ", r"| [`\1`](\1.md) ", markdown, flags=re.M)

    def moved(link: re.Match[str]) -> str:
        target = _target(origin, link[1])
        if not (ROOT / target).is_file():
            return link[1]
        return os.path.relpath(_page(target), posixpath.dirname(here) or ".")

    return LINK.sub(moved, quotes.quoted(markdown, quotes.load()))


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _page(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    inside = path.removeprefix(f"{DOCS}/")
    return inside if inside != path or path.endswith(".md") else f"{path}.md"
