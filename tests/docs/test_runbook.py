"""Every message that the runbook and the tables of the orchestrators quote is one that the code has."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from tests.conftest import ROOT
from tests.docs.pages import text_of

PACKAGES = ("core", "airflow_provider", "dagster_integration")
PAGES = ("docs/runbook.md", "docs/airflow.md", "docs/dagster.md")
PLACE = re.compile(r"%[-+.\d]*[sdgfr]|\{\w*\}")
"""A place in a message that is filled when it is written."""

DIFFERS = re.compile(r"\.\.\.|'\w+'|SIG[A-Z]+ \(|\(did you mean|\?\)")
"""The parts of a message on a page that differ from one time to another."""

OF_OTHERS = ("RuntimeError: Numpy is not available", "Attempted to run ...")
"""How messages of Python, torch and Dagster begin."""


@functools.cache
def texts() -> str:
    """Every text of the code, with `...` for what differs."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(PLACE.sub("...", node.value))
    return "\n".join(found)


def quoted(page: str) -> list[str]:
    """The messages in the first column of the tables that explain messages."""
    rows = re.findall(r"^\| (.+?) \| ", text_of(page), re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    tables = {"docs/airflow.md": "## Troubleshooting", "docs/dagster.md": "## Troubleshooting"}
    if heading := tables.get(page):
        section = text_of(page).partition(heading)[2].partition("\n## ")[0]
        messages = [message for message in messages if f"| `{message}`" in section]
    return [message for message in messages if not message.startswith((*OF_OTHERS, "rankzero "))]


@pytest.mark.parametrize(("page", "message"), [(page, message) for page in PAGES for message in quoted(page)])
def test_the_code_has_the_message(page: str, message: str) -> None:
    parts = [part.strip(" :;,()") for part in DIFFERS.split(message)]
    assert any(len(part) > 5 for part in parts), "too little to find it by"
    for part in parts:
        assert part in texts(), f"{page}: {message}"
