"""The driver of a run as a process beside the agent of task 0, so that the run needs no client any more.

`rankzero.task.staged` starts it and ends it, and the kernel ends it if its parent dies. It reads its input from
standard input.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.auth import new_secret
from rankzero.driver.driver import Driver
from rankzero.driver.handover import RETRY_INTERVAL
from rankzero.driver.policy import Restarts, Start
from rankzero.engines.base import within
from rankzero.engines.staged import StageEngine
from rankzero.errors import EngineError
from rankzero.host import descendants
from rankzero.host.processes import allow_open_files, settle_signals
from rankzero.run.directory import RunDirectory, RunStatus
from rankzero.task import staged

logger = logging.getLogger(__name__)

STORE_TIMEOUT = 15.0
"""Seconds for the store to answer; if it does not, the process that submitted the stage drives the run."""

GO_TIMEOUT = 10.0
"""Seconds for the submitting process to give up the run; after that it counts as dead."""


def main() -> None:
    """Entry point: reads one line of JSON from standard input, whose end of file ends this process."""
    settle_signals()
    descendants.signal_on_parent_death(signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stage = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != stage["holder"][0]:
        sys.exit("the task that started this driver has ended")
    threading.Thread(target=_end_with_task, name="rankzero-task", daemon=True).start()
    try:
        engine = StageEngine.listen(stage)
    except (OSError, EngineError) as error:
        _refuse(stage, f"its driver cannot listen for the agents: {error}")
    engine.announce(stage["first_attempt"])
    claims: list[bool | str] = []
    within(STORE_TIMEOUT, lambda: claims.append(_claim(stage)))
    claim = claims[0] if claims else f"its store has not answered within {STORE_TIMEOUT:g} s"
    if isinstance(claim, str):
        _refuse(stage, f"it does not see {stage['directory']}: {claim}")
    if not claim:
        sys.exit(f"{stage['folder']} has had a driver: Spark runs this stage again")
    allow_open_files()
    _await_go(stage["folder"])
    code = 1
    try:
        final = json.dumps(vars(_drive(stage, engine))).encode()
        if stage["folder"] != stage["tasks"]:
            within(STORE_TIMEOUT, lambda: store.write_bytes(store.join(stage["folder"], staged.OVER), final))
        # Written last: the tasks keep their slots until then, and task 0, which polls it, ends this process.
        store.write_bytes(store.join(stage["tasks"], staged.OVER), final)
        code = 0
    except BaseException:
        logger.exception("the outcome of the run could not be written")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _claim(stage: dict[str, Any]) -> bool | str:
    """Returns True if this process claimed the stage, False if another did, or why this process cannot drive."""
    try:
        if RunDirectory(stage["directory"]).token() == stage["token"]:
            return store.create(store.join(stage["folder"], staged.READY), new_secret().encode())
        return "this path is another directory on this host"
    except Exception as error:
        # Drivers of object stores raise exceptions of their own types.
        logger.exception("%s cannot be used from here", stage["directory"])
        return f"{type(error).__name__}: {error}"


def _refuse(stage: dict[str, Any], why: str) -> NoReturn:
    staged.put(stage["tasks"], staged.WHY, why)
    # A thread may still wait for the store.
    os._exit(staged.UNSEEN_CODE)


def _drive(stage: dict[str, Any], engine: StageEngine) -> RunStatus:
    run = RunDirectory(stage["directory"])
    start = Start(stage["first_attempt"], Restarts(**stage["budget"]))
    driver = Driver(run, engine, stage["env"], leased=True, start=start, trackers=stage["trackers"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: driver.inbox.interrupt(f"the driver got {signal.Signals(got).name}"))
    driver.run()
    return driver.status


def _end_with_task() -> None:
    """Exits when the task ends. The run does not end with it: the submitter, or a new submission, continues it."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def _await_go(folder: str) -> None:
    deadline, tick = time.monotonic() + GO_TIMEOUT, threading.Event()
    while not _is_let_go(folder):
        if time.monotonic() > deadline:
            # The process that creates this file writes the run from now on; a submitter that was only stopped finds it.
            store.patiently(
                lambda: store.create(store.join(folder, staged.GO), b"driver"), STORE_OUTAGE, RETRY_INTERVAL
            )
            return
        tick.wait(staged.poll_interval(folder))


def _is_let_go(folder: str) -> bool:
    try:
        return staged.GO in store.list_names(folder)
    except Exception as error:
        logger.warning("cannot poll the process that submitted the stage: %s", error)
        return False
