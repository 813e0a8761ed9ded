"""Runs the blocks of code of the documentation, and the examples of docstrings, as they stand there."""

from __future__ import annotations

import contextlib
import doctest
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.conftest import ROOT, until
from tests.docs.pages import PAGES, Block
from tests.docs.pages import blocks as blocks_of
from tests.handlers import restore_signal_handlers, signal_handlers
from tests.loading import load_module

from rankzero import RunHandle
from rankzero.cli import main
from rankzero.host.processes import process_state

CODE = {"python", "console", "bash", "yaml", "ini", "dockerfile"}
"""Languages of what can be run; everything else is output or a diagram."""

NOT_RUN = {
    "a cluster": 4,
    "a deployment": 7,
    "an installation": 7,
    "a server": 1,
    "mlflow": 1,
    "Optuna": 1,
}
"""How many blocks are not run, and what they would need."""

WAIT = 120.0


def all_blocks() -> list[Block]:
    """Those of code, of every page."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in CODE]


def room(block: Block) -> str:
    """Whose tests run it: Airflow is imported by its own only, and so is Dagster."""
    for name in ("airflow", "dagster"):
        if f"{name}_rankzero" in block.text or block.page.startswith(f"docs/{name}"):
            return name
    return "docs"


def pages_of(name: str) -> list[str]:
    """The pages that have blocks for the tests of this room."""
    return list(dict.fromkeys(block.page for block in all_blocks() if room(block) == name and not block.mark))


def run_page(page: str, name: str, given: Mapping[str, Any], request: pytest.FixtureRequest) -> None:
    """Runs the blocks of a page that belong to this room, in their order; each sees the names of those before it.

    Args:
        page: The page.
        name: The room.
        given: What the page leaves to its reader: names that every block finds.
        request: Of the test, for fixtures of tests that a block shows.
    """
    names: dict[str, Any] = {"__name__": "a_page"}
    for block in blocks_of(page):
        if block.language in CODE and not block.mark and room(block) == name:
            try:
                _RUN[block.language](block, names | dict(given), names, request)
            except Exception as error:
                raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error


def _python(block: Block, found: dict[str, Any], names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    # Of a file, as far as anybody can see: whoever asks for the source of a function finds it.
    source = "\n" * block.line + block.text
    file = f"{block.page}.{block.line}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    before = set(found)
    exec(compile(source, file, "exec", dont_inherit=True), found)
    names |= {key: value for key, value in found.items() if key not in before or value is not names.get(key)}
    for key in found.keys() - before:
        if key.startswith("test_"):
            code = found[key].__code__
            found[key](*map(request.getfixturevalue, code.co_varnames[: code.co_argcount]))
    if written := re.search(rf"`(\w+\.py)`:\n\n```python\n{re.escape(block.text)}", (ROOT / block.page).read_text()):
        Path(written[1]).write_text(block.text)


def _console(block: Block, *_: object) -> None:
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    assert lines, "no command: a line of one begins with $"
    variables: dict[str, str] = {}
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program == "rankzero":
            # Where runs are if nobody names a store.
            arguments = [argument.replace("~/.rankzero/runs", os.environ["RANKZERO_STORE"]) for argument in arguments]
            before = signal_handlers()
            done = CliRunner(env=variables).invoke(main, arguments)
            # The command's process is its own, but here.
            restore_signal_handlers(before)
            assert done.exit_code == 0, f"{line}\n{done.output}"
            if "--detach" in arguments:
                _await_detached(done.output.split()[-1])
        elif program == "export":
            variables |= dict(argument.split("=", 1) for argument in arguments)
        elif program == "python":
            run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=WAIT)
            assert run.returncode == 0, f"{line}\n{run.stderr}"
        else:
            # What stands beside ours to be compared with it.
            assert program == "torchrun", f"{program} is not run: mark the block"


def _await_detached(directory: str) -> None:
    """It outlives the block, not the test."""
    handle = RunHandle.attach(directory)
    handle.result_ref(WAIT)
    status = handle.status()
    assert status.driver_pid is not None
    pid, start = status.driver_pid, status.driver_start
    until(lambda: process_state(pid, start) is None, WAIT, "the driver of a detached run has ended")


def _bash(block: Block, found: Mapping[str, Any], *_: object) -> None:
    shown = subprocess.run(
        ["bash", "-ec", f"{block.text}\nenv -0"], capture_output=True, check=True, timeout=WAIT, text=True, env={}
    )
    variables = dict(item.split("=", 1) for item in shown.stdout.split("\0") if "=" in item)
    found["look_at"]({key: value for key, value in variables.items() if f"export {key}=" in block.text})


def _other(block: Block, found: Mapping[str, Any], *_: object) -> None:
    found["look_at"](block.text)


_RUN: dict[str, Any] = {"python": _python, "console": _console, "bash": _bash, "yaml": _other, "ini": _other}


def commands() -> list[tuple[str, str]]:
    """Every line of the command that the documentation shows, in blocks or in sentences, with its page."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        shown = re.findall(r"^\$ (rankzero .*)$", text, re.M) + re.findall(r"`(rankzero [a-z]+ [^`\n|]*)`", text)
        found += [(page, line) for line in shown]
    return found


def parse(line: str) -> None:
    """Raises click's errors for a line with an option or a command that does not exist."""
    _, name, *arguments = [word for word in shlex.split(line, comments=True) if word != "..."]
    command = main.commands[name]
    flags = {name for option in command.params if getattr(option, "is_flag", False) for name in option.opts}
    if arguments and arguments[-1].startswith("--") and arguments[-1] not in flags:
        # A sentence that leaves the value out.
        arguments.append("1")
    with contextlib.suppress(SystemExit), command.make_context(name, arguments, resilient_parsing=False):
        pass


def modules_with_examples(package: Path) -> list[str]:
    """Names of the modules below a package's folder whose docstrings have an example."""
    files = [path for path in sorted(package.rglob("*.py")) if ">>> " in path.read_text()]
    dotted = [path.relative_to(package.parent).with_suffix("").parts for path in files]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in dotted]


def run_examples(name: str) -> None:
    """Runs every example of a module, which sees what the module sees. Raises AssertionError with what differed."""
    module, report = load_module(name), list[str]()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
