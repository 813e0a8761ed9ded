"""The driver of a run as a process beside the agent of task 0 of its stage, so that the run needs no client any more.

`rankzero.task.stage` starts it, and ends it with the task. It reads its input from standard input.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading

from rankzero.driver.main import LOG_FORMAT, drive
from rankzero.engines.connect.stage import StageEngine
from rankzero.host import descendants
from rankzero.host.processes import settle_signals
from rankzero.run.directory import RunDirectory


def main() -> None:
    """Entry point: reads one line of JSON from standard input, whose end of file ends this process."""
    settle_signals()
    # A stopped process does not read the end of its standard input.
    descendants.signal_on_parent_death(signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    stage = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_task, name="rankzero-task", daemon=True).start()
    run = RunDirectory(stage["directory"])
    engine = StageEngine(
        stage["folder"], stage["num_tasks"], stage["host"], stage["secret"], stage["place"], stage["encrypts"]
    )
    # If no driver can listen here, the stage fails before the run is claimed, and the submitter drives the run.
    engine.check(run.job())
    drive(run, stage["submission"], lambda: {"env": stage["env"], "trackers": stage["trackers"]}, engine=engine)


def _end_with_task() -> None:
    """Exits when the task ends. The next submission of the run continues it."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)
