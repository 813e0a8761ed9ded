"""What `scripts/reference.py` makes: the lines that type checkers need, and the pages of the reference."""

import json
import os
import posixpath
import re
import subprocess
import sys

from tests.conftest import ROOT
from tests.docs.pages import anchors

import rankzero


def made(*arguments: str) -> str:
    # In a process of its own: no variable of Airflow changes the defaults that it shows.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_lines_for_type_checkers_are_what_the_table_of_options_says() -> None:
    made("--check")


def test_the_reference_has_a_page_for_each_module_and_an_entry_for_each_name() -> None:
    pages = json.loads(made("--pages"))
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
