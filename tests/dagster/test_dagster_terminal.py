"""A person at a terminal presses Ctrl-C once: the training ends, whatever retries the step may have."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import ROOT, processes_with, until, wait_until_gone
from tests.dagster import durable_training

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
    "dg.materialize in a script": ["-c", MATERIALIZE],
}


class Terminal:
    """A program in the foreground of a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, env=environment, preexec_fn=lambda: _take_over(screen)
        )
        os.close(screen)
        self.shown = b""

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def read(self) -> None:
        """Takes what the program has written, so that it never waits for room."""
        with contextlib.suppress(OSError):
            while select.select([self._keyboard], [], [], 0)[0]:
                self.shown += os.read(self._keyboard, 1 << 16)

    def has_ended(self) -> bool:
        self.read()
        return self.process.poll() is not None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        os.close(self._keyboard)


def _take_over(screen: int) -> None:
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
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    assert wait_until_gone(f"OF_RANK={mark}") == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_ends_the_training(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, *PROGRAMS[name]], environment)
    try:

        def trains() -> bool:
            assert not terminal.has_ended(), terminal.shown.decode("utf-8", "replace")
            jobs = list((tmp_path / "runs").glob("*/job.json"))
            return bool(jobs) and RunHandle.attach(jobs[0].parent).status().checkpoint is not None

        until(trains, WAIT, "a training")
        assert processes_with(f"OF_RANK={environment['TEST_RANK_MARK']}")
        terminal.press(CTRL_C)
        pressed = time.monotonic()
        until(terminal.has_ended, WAIT, "the end of the program")
        assert wait_until_gone(f"OF_RANK={environment['TEST_RANK_MARK']}", 5) == []
        print(f"ended {time.monotonic() - pressed:.1f} s after the key")
        (job,) = (tmp_path / "runs").glob("*/job.json")
        handle = RunHandle.attach(job.parent)
        assert handle.status().state == "cancelled"
        # Once was enough: no other try began.
        assert handle.submission == 0
        assert not (tmp_path / "step-1").exists()
    finally:
        terminal.close()
