"""A command as a rank: any program, started with the rank's environment, as by torchrun's ``--no-python``."""

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
    """The command failed.

    Attributes:
        facts: What is known of it, as of a failure.
    """

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = {"exception_type": None, "message": message, "traceback": None, **facts}


def run_command(line: list[str]) -> None:
    """Runs a command to its end. A SIGTERM to the rank goes to the command, which then has the run's grace.

    Raises:
        CommandError: it ended by a signal, or with an exit code other than 0.
        OSError: it cannot be started.
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
    """What ``record`` of ``torch.distributed.elastic`` wrote of a Python program's exception; empty if it did not."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
            message = json.load(file)["message"]
        kind, _, text = str(message["message"]).partition(": ")
        return {"exception_type": kind, "message": text, "traceback": str(message["extraInfo"]["py_callstack"])}
    return {}
