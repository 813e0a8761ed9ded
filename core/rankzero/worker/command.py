"""Runs a command as a rank: any program, in the rank's environment, like torchrun's ``--no-python``."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from typing import Any

from rankzero.host.processes import signal_name


class CommandError(Exception):
    """Raised when the command of a rank fails.

    Attributes:
        facts: Fields of the failure message: exception, exit code, signal.
    """

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = {"exception_type": None, "message": message, "traceback": None, **facts}


def run_command(line: list[str]) -> None:
    """Runs a command to its end. A SIGTERM to the rank is forwarded to the command, which then has the run's grace.

    Raises:
        CommandError: the command was killed by a signal, or exited with a code other than 0.
        OSError: the command cannot be started.
    """
    process = subprocess.Popen(line)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    code = process.wait()
    if code == 0:
        return
    what = f"the command {shlex.join(line)!r}"
    if code < 0:
        name = signal_name(-code)
        raise CommandError(f"{what} was killed by {name}", {"exit_code": None, "signal": name})
    raise CommandError(f"{what} exited with code {code}", {"exit_code": code, "signal": None, **_recorded()})


def _recorded() -> dict[str, Any]:
    """Returns the exception that ``record`` of ``torch.distributed.elastic`` wrote; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
            message = json.load(file)["message"]
        kind, _, text = str(message["message"]).partition(": ")
        return {"exception_type": kind, "message": text, "traceback": str(message["extraInfo"]["py_callstack"])}
    return {}
