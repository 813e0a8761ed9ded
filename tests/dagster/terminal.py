"""A person's terminal, in which a test runs a program and presses keys."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from tests import servers
from tests.conftest import ROOT

WAIT = 120.0
CTRL_C = b"\x03"


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
            cwd=ROOT,
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
