"""Hooks of mkdocs: files of the repository that pages link to are pages of the site, too; numbers come from results."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import quotes  # noqa: E402

DOCS = "docs"

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


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    from mkdocs.structure.files import File

    for path in sorted(linked(f"{DOCS}/{file.src_uri}" for file in files.documentation_pages())):
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f"# `{path}`\n\n```{path.rpartition('.')[2]}\n{text}```\n"
        files.append(File.generated(config, _page(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads their links, and those to them, to where they are in the site."""
    here = page.file.src_uri
    origin = here if page.file.generated_by else f"{DOCS}/{here}"

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
