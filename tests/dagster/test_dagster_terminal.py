"""A person at a terminal presses Ctrl-C once: the training ends, whatever retries the step may have."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests import servers
from tests.conftest import ROOT, processes_with, until, wait_until_gone
from tests.dagster import durable_training
from tests.dagster.deployment import Deployment

from rankzero import RunHandle

WAIT = 120.0
CTRL_C = b"\x03"

MATERIALIZE = """
import dagster as dg
from tests.dagster.durable_training import defs, durable
dg.materialize([durable], resources=defs.resources)
"""

PROGRAMS = {
    # A process for each step, below the one of the run.
    "dagster job execute": [
        *("-m", "dagster", "job", "execute", "-f", durable_training.__file__, "-j", "durable_job"),
    ],
    "dagster job execute, in one process": [
        *("-m", "dagster", "job", "execute", "-f", durable_training.__file__, "-j", "durable_in_process"),
    ],
    "dg launch": ["-m", "dagster_dg_cli.cli", "launch", "--assets", "durable", "-f", durable_training.__file__],
    "dg.materialize in a script": ["-c", MATERIALIZE],
}


class Terminal:
    """A shell in a terminal of its own, and a program that it runs in the foreground."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            # -m: the program is a process group of its own, which a key reaches and the shell's end does not.
            ["bash", "-m", "-c", '"$@"; exit $?', "bash", *command],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment,
            preexec_fn=lambda: _own_terminal(screen),
        )
        os.close(screen)
        self.shown = b""
        # So that the program never waits for room.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # An end of file of a terminal is an error.
        with contextlib.suppress(OSError):
            while read := os.read(self._keyboard, 1 << 16):
                self.shown += read

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        for pid in servers.session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT)
        self._reader.join(WAIT)
        os.close(self._keyboard)


def _own_terminal(screen: int) -> None:
    """In the child: a session of its own, whose terminal this is, and default signals, as a terminal emulator does.

    Whoever runs the tests in the background of a script ignores SIGINT, and so would the child.
    """
    import fcntl
    import termios

    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    mark = f"of-{tmp_path.name}-{os.getpid()}"
    yield {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "TEST_FOLDER": str(tmp_path),
        "TEST_STORE": str(tmp_path / "runs"),
        "TEST_ASSETS": str(tmp_path / "assets"),
        "TEST_RANK_MARK": mark,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    assert wait_until_gone(f"OF_RANK={mark}") == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_ends_the_training(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, *PROGRAMS[name]], environment)
    try:
        await_training(terminal, tmp_path)
        assert_ctrl_c_ends_it(terminal, environment, tmp_path)
    finally:
        terminal.close()


def test_ctrl_c_of_dagster_dev_ends_the_trainings_of_its_runs(environment: dict[str, str], tmp_path: Path) -> None:
    terminals: list[Terminal] = []

    def start(*command: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        terminals.append(Terminal(command, env))
        return terminals[0].process

    dagster = Deployment(Path(environment["DAGSTER_HOME"]), Path(durable_training.__file__), environment, start)
    try:
        (terminal,) = terminals
        # Whoever sits at a terminal wants the end of it all, though the run would be started again.
        dagster.launch("durable_job", {"dagster/max_retries": "1"})
        await_training(terminal, tmp_path)
        assert_ctrl_c_ends_it(terminal, environment, tmp_path)
        # What the webserver, the daemon and the code server were, too.
        assert wait_until_gone(dagster.marker, WAIT) == []
    finally:
        dagster.stop()
        for terminal in terminals:
            terminal.close()


def await_training(terminal: Terminal, folder: Path) -> None:
    def trains() -> bool:
        assert not terminal.has_ended(), terminal.shown.decode("utf-8", "replace")
        jobs = list((folder / "runs").glob("*/job.json"))
        return bool(jobs) and RunHandle.attach(jobs[0].parent).status().checkpoint is not None

    until(trains, WAIT, "a training")


def assert_ctrl_c_ends_it(terminal: Terminal, environment: dict[str, str], folder: Path) -> None:
    ranks = f"OF_RANK={environment['TEST_RANK_MARK']}"
    assert processes_with(ranks)
    terminal.press(CTRL_C)
    pressed = time.monotonic()
    until(terminal.has_ended, WAIT, "the end of the program")
    assert wait_until_gone(ranks, WAIT) == []
    print(f"ended {time.monotonic() - pressed:.1f} s after the key")
    (job,) = (folder / "runs").glob("*/job.json")
    handle = RunHandle.attach(job.parent)
    # Its driver writes that after the ranks have ended, and is no part of the program.
    until(lambda: handle.status().final, WAIT, "the end of the run")
    assert handle.status().state == "cancelled"
    # Once was enough: no other try began.
    assert handle.submission == 0
    assert not (folder / "step-1").exists()
