"""The driver of a run as a process beside the agent of task 0, where no client is needed any more.

Started by `rankzero.task.staged`, ended by it, and by the kernel if it dies. What it needs comes by standard input.
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
from rankzero.driver.handover import LOOK_AGAIN
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
"""Seconds for the store to answer; a run whose store does not is driven by whoever submitted it."""

GO_TIMEOUT = 10.0
"""Seconds for whoever submitted the stage to let go of the run; one that does not has died."""


def main() -> None:
    """Entry point: one line of JSON on standard input, whose end is this process's."""
    settle_signals()
    descendants.signal_on_parent_death(signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    told = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != told["holder"][0]:
        sys.exit("the task that started this driver has ended")
    threading.Thread(target=_end_with_task, name="rankzero-task", daemon=True).start()
    try:
        engine = StageEngine.listen(told)
    except (OSError, EngineError) as error:
        _refuse(told, f"its driver cannot listen for the agents: {error}")
    engine.announce(told["first_attempt"])
    claims: list[bool | str] = []
    within(STORE_TIMEOUT, lambda: claims.append(_claim(told)))
    claim = claims[0] if claims else f"its store has not answered within {STORE_TIMEOUT:g} s"
    if isinstance(claim, str):
        _refuse(told, f"it does not see {told['directory']}: {claim}")
    if not claim:
        sys.exit(f"{told['folder']} has had a driver: Spark runs this stage again")
    allow_open_files()
    _await_go(told["folder"])
    code = 1
    try:
        final = json.dumps(vars(_drive(told, engine))).encode()
        if told["folder"] != told["tasks"]:
            within(STORE_TIMEOUT, lambda: store.write_bytes(store.join(told["folder"], staged.OVER), final))
        # Last: the tasks hold their places until then, and task 0, which sees it, ends this process.
        store.write_bytes(store.join(told["tasks"], staged.OVER), final)
        code = 0
    except BaseException:
        logger.exception("the outcome of the run could not be written")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _claim(told: dict[str, Any]) -> bool | str:
    """True for the one driver of this stage; why, if this process does not see the run directory, or may not write."""
    try:
        if RunDirectory(told["directory"]).token() == told["token"]:
            return store.create(store.join(told["folder"], staged.READY), new_secret().encode())
        return "it is another one here"
    except Exception as error:
        # Drivers of object stores have exceptions of their own.
        logger.exception("%s cannot be used from here", told["directory"])
        return f"{type(error).__name__}: {error}"


def _refuse(told: dict[str, Any], why: str) -> NoReturn:
    staged.put(told["tasks"], staged.WHY, why)
    # A thread may still wait for the store.
    os._exit(staged.UNSEEN_CODE)


def _drive(told: dict[str, Any], engine: StageEngine) -> RunStatus:
    run = RunDirectory(told["directory"])
    start = Start(told["first_attempt"], Restarts(**told["budget"]))
    driver = Driver(run, engine, told["env"], leased=True, start=start, trackers=told["trackers"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: driver.inbox.interrupt(f"the driver got {signal.Signals(got).name}"))
    driver.run()
    return driver.status


def _end_with_task() -> None:
    """Its end is no end of the run: the next attempt is for whoever submitted the stage, or comes back to the run."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def _await_go(folder: str) -> None:
    deadline, tick = time.monotonic() + GO_TIMEOUT, threading.Event()
    while not _is_let_go(folder):
        if time.monotonic() > deadline:
            # Whoever creates it writes from now on: one that was only stopped sees that it was too late.
            store.patiently(lambda: store.create(store.join(folder, staged.GO), b"driver"), STORE_OUTAGE, LOOK_AGAIN)
            return
        tick.wait(staged.poll_interval(folder))


def _is_let_go(folder: str) -> bool:
    try:
        return staged.GO in store.list_names(folder)
    except Exception as error:
        logger.warning("cannot look for whoever submitted the stage: %s", error)
        return False
