"""What the site is made of: links, anchors and navigation. `make docs` builds it, strictly."""

from __future__ import annotations

import posixpath
import re
import tomllib

import pytest
import yaml
from tests.conftest import ROOT
from tests.docs.pages import PAGES, anchors, links, text_of

EXAMPLES = "example_dags/README.md"


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
    assert sorted(shown) == sorted([*docs, EXAMPLES])


@pytest.mark.parametrize("page", [*PAGES, EXAMPLES])
def test_lists_are_lists_on_the_site_too(page: str) -> None:
    # GitHub begins a list without an empty line before it, Python-Markdown does not.
    assert not re.search(r"^(?![*\-|]|\d+\.|\s|```|$).+\n[*-] ", text_of(page), re.M), page


def test_the_page_on_installing_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"none": project["dependencies"], **project["optional-dependencies"]}
    rows = dict(re.findall(r"^\| (.+?) \|(.*)$", text_of("docs/installing.md").partition("## ")[0], re.M))
    for name, required in extras.items():
        if name == "dev":
            continue
        brings = next((brings for names, brings in rows.items() if name in re.findall(r"[\w-]+", names)), None)
        assert brings, f"no row for {name}"
        if name in ("none", "data", "delta", "spark", "torch"):
            for package in required:
                assert re.match(r"[\w-]+", package)[0] in brings, f"{name}: {package}"
