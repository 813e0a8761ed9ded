"""What `scripts/reference.py` makes: the lines that type checkers need, and the pages of the reference."""

import json
import os
import posixpath
import re
import subprocess
import sys

import pytest
from tests.conftest import ROOT
from tests.docs.pages import anchors

import rankzero


@pytest.fixture(scope="module")
def made() -> "subprocess.CompletedProcess[str]":
    """One process for all: it imports everything. No variable of Airflow changes the defaults that it shows."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check", "--pages"]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)


def test_the_lines_for_type_checkers_are_what_the_table_of_options_says(
    made: "subprocess.CompletedProcess[str]",
) -> None:
    assert made.returncode == 0, made.stderr[-2000:]


def test_the_reference_has_a_page_for_each_module_and_an_entry_for_each_name(
    made: "subprocess.CompletedProcess[str]",
) -> None:
    assert made.stdout, made.stderr[-2000:]
    pages = json.loads(made.stdout)
    headings = {name: re.findall(r"^## `(\w+)`$", page, re.M) for name, page in pages.items()}
    assert headings["rankzero.md"] == sorted(rankzero.__all__, key=str.lower)
    assert all(headings.values())
    assert "TorchDistributorOperator" in headings["airflow_rankzero.md"]
    index = (ROOT / "docs/reference/README.md").read_text()
    assert [f"{name}.md" for name in re.findall(r"^\| `([\w.]+)` \|", index, re.M)] == list(pages)
    for name, page in pages.items():
        for link in re.findall(r"\]\((\.\./[^)]+)\)", page):
            path, _, anchor = link.partition("#")
            assert anchor in anchors(posixpath.normpath(f"docs/reference/{path}")), f"{name}: {link}"
