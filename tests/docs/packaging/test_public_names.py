"""A public name that changes needs a line in the CHANGELOG."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.conftest import ROOT

MODULES = {"source": ["trainer"]}
BEFORE = """
__all__ = ["Handle", "run"]

def run(function, num_processes=1):
    '''Runs a function.'''

class Handle:
    '''A handle.'''

    def wait(self, timeout=None):
        '''Waits.'''

def inner(a): ...
"""
CHANGELOG = "# Changelog\n\n## [0.2.0] - unreleased\n{}\n\n## [0.1.0] - 2026-01-01\n* `run`, `Handle.wait` are new.\n"


@pytest.fixture
def check_api() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("check_api")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose release 0.1.0 is tagged."""
    (tmp_path / "source" / "trainer").mkdir(parents=True)
    (tmp_path / "source" / "trainer" / "__init__.py").write_text(BEFORE)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(""))

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "0.1.0")
    git("tag", "v0.1.0")
    return tmp_path


def change(repository: Path, old: str, new: str) -> None:
    file = repository / "source" / "trainer" / "__init__.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("def run(function, num_processes=1)", "def run(function, processes=1)", "`run`"),
        ("def wait(self, timeout=None)", "def wait(self, timeout)", "`Handle.wait`"),
        ("class Handle", "class Follower", "`Handle`"),
    ],
)
def test_a_change_that_breaks_callers_needs_its_line(
    check_api: ModuleType, repository: Path, old: str, new: str, word: str
) -> None:
    assert check_api.last_release(repository) == "v0.1.0"
    assert check_api.unexplained(repository, "v0.1.0", MODULES) == []
    change(repository, old, new)
    lines = check_api.unexplained(repository, "v0.1.0", MODULES)
    assert lines
    assert all(word.strip("`") in line for line in lines)
    (repository / "CHANGELOG.md").write_text(CHANGELOG.format(f"* {word} changed."))
    assert check_api.unexplained(repository, "v0.1.0", MODULES) == []


def test_internal_and_compatible_changes_need_none(check_api: ModuleType, repository: Path) -> None:
    change(repository, "def inner(a)", "def inner(b)")
    change(repository, "def run(function, num_processes=1)", "def run(function, num_processes=1, *, use_gpu=False)")
    assert check_api.unexplained(repository, "v0.1.0", MODULES) == []
