"""What the site is made of: links, anchors and navigation. `make docs` builds it, strictly."""

from __future__ import annotations

import posixpath
import re

import pytest
import yaml
from tests.conftest import ROOT
from tests.docs.pages import PAGES, anchors, links, text_of

EXAMPLES = "example_dags/README.md"


@pytest.mark.parametrize("page", PAGES)
def test_quoted_numbers_are_those_of_the_last_measurement(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import quotes

    text = text_of(page)
    assert text == quotes.quoted(text, quotes.load()), "python benchmarks/quotes.py writes them again"
    assert not re.search(r"^\s*<!--bench", text, re.M), "a comment that begins a line ends the paragraph"


@pytest.mark.parametrize("page", [*PAGES, EXAMPLES])
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert (ROOT / target).is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_the_navigation_has_every_page_once() -> None:
    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        members = node.values() if isinstance(node, dict) else node
        assert isinstance(members, list) or isinstance(node, dict)
        return [page for member in members for page in pages(member)]

    # Its other tags are the site generator's.
    shown = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    modules = re.findall(r"^\| `([\w.]+)` \|", text_of("docs/reference/README.md"), re.M)
    made = [f"reference/{module}.md" for module in modules]
    assert sorted(shown) == sorted([*docs, EXAMPLES, *made])


@pytest.mark.parametrize("page", [*PAGES, EXAMPLES])
def test_lists_are_lists_on_the_site_too(page: str) -> None:
    # GitHub begins a list without an empty line before it, Python-Markdown does not.
    assert not re.search(r"^(?![*\-|]|\d+\.|\s|```|$).+\n[*-] ", text_of(page), re.M), page


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_begins_with_what_its_reader_can_do(page: str) -> None:
    assert re.match(r"# .+\n\nWith this (page|section) you ", text_of(page))


def test_the_pictures_are_those_of_their_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import pictures

    for name, picture in pictures.PICTURES.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text() == pictures.drawn(picture)
