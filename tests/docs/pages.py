"""The pages of the documentation: their links, their anchors, their blocks of code."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tests.conftest import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#+ (.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: Its page.
        line: The line on which it begins.
        language: What the page calls it; may be empty.
        text: The code.
        mark: Why it is not run: what stands in a comment before it, ``<!-- not run: mark -->``; else empty.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def text_of(page: str) -> str:
    """The page."""
    return (ROOT / page).read_text()


@functools.cache
def prose(page: str) -> str:
    """The page without its code."""
    return _CODE.sub("", _FENCE.sub("", text_of(page)))


def blocks(page: str) -> list[Block]:
    """Its blocks of code."""
    found = []
    for match in _FENCE.finditer(text_of(page)):
        before = text_of(page)[: match.start()]
        mark = re.search(r"<!-- not run: (.*?) -->\s*\Z", before)
        found.append(Block(page, before.count("\n") + 1, match[2], match[3], mark[1] if mark else ""))
    return found


@functools.cache
def anchors(page: str) -> frozenset[str]:
    """What a link into the page may name: its headings, as GitHub and the site call them, and its own anchors."""
    text = _FENCE.sub("", text_of(page))
    return frozenset([*map(slug, _HEADING.findall(text)), *re.findall(r'<a id="(.*?)">', text)])


def slug(heading: str) -> str:
    """The anchor of a heading; empty if GitHub and the site have two for it, so that no link may lead there."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower()
    of_github, of_site = plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)
    return of_site if of_github == of_site else ""


def links(page: str) -> list[str]:
    """Where it leads, without the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not link.startswith(("http://", "https://"))]
