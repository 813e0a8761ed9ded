"""A task of a stage that has the driver of its run in task 0: it holds the agents of one attempt after the other.

Driver and tasks meet in a folder of the run directory, which all of them see; secrets are in none of its files. Where
the run directory is on an object store, the folder is one of task 0's host, and task 0 relays between it and the other
tasks by Spark's `allGather`: the driver alone asks anything of the store. Runs in Spark's Python worker, is pickled by
value, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

from rankzero.task.hold import hold, scratch_root
from rankzero.task.start import start_time

READY = "ready"
"""Written by the driver in the stage: it is there."""

GO = "go"
"""Written by whoever has submitted the stage: it writes nothing into the run directory any more."""

ATTEMPT = "attempt-"
"""Begins the name of the file, with the attempt's number, that says where agents find the driver. That of the first is
there before the driver knows whether it is the one: agents start meanwhile, and wait for it."""

CANCEL = "cancel-"
"""The same: the agents of this attempt are to be killed."""

ENDED = "ended-"
"""With numbers of attempt and task: the agent has ended. Holds what was wrong."""

OVER = "over"
"""Written by the driver: there are no more attempts. For whoever has submitted the stage it holds the final status."""

UNSEEN = "rankzero: this executor cannot drive the run"
"""In the error of a task whose host does not see the run directory, or where no driver can listen."""

UNSEEN_CODE = 3
"""Exit code of a driver there."""

WHY = "unseen"
"""In this file it says why."""

DRIVER_ENDED = "rankzero: the driver of the run in task 0 ended"

LOOK = 0.02
LOOK_REMOTE = 0.1
"""Seconds between two looks of the driver and of whoever has submitted the stage for each other; on an object store,
where that is a request, more."""

LONG_LOOK = 0.5
PATIENCE = 5.0
"""Seconds between two looks into the folder for the next attempt, and after how many they become rarer. By a listing:
that a name is not there NFS remembers for long."""

DRIVER_LOOK = 0.2
LOOKS_PER_LISTING = 10
"""Seconds between two looks at the driver, which cost nothing. Every tenth is one into the folder, too, for a request
to kill the agent: a thousand tasks look there."""

ENDED_LOOK = 0.1
"""Seconds between two looks of the driver for what its agents leave."""

DRIVER_EXIT_TIMEOUT = 10.0
"""Seconds for the driver, and for agents, to end once the driver has said that all is over."""

RELAY_TIMEOUT = 30.0
"""Seconds for the other tasks to say that their agents have ended, once the driver has cancelled these or has ended.
Then task 0 ends, and with it Spark the stage: nobody else can reach an agent that does not obey."""

_DRIVER = "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; "
_DRIVER += "sys.path.append(sys.path.pop(0)); from rankzero.driver.staged import main; main()"


def run_task(config: dict[str, Any]) -> None:
    """Holds one agent, or those of all attempts that the driver in this stage makes.

    Raises:
        RuntimeError: the agent crashed, or this host does not see the run directory, or the driver crashed.
    """
    stage = config.pop("stage", None)
    if stage is None:
        hold(config)
        return
    if not stage["relays"]:
        _require_directory(stage)
    driver = _start_driver(config, stage) if config["task"] == 0 else None
    last = -1
    try:
        while (found := _next_attempt(stage, last, driver)) is not None:
            last, told = found
            error = _hold_attempt(config, stage, last, told, driver)
            _report_end(config["task"], stage, last, error, driver)
    finally:
        if driver:
            _end_driver(driver, config)


def look_interval(folder: str) -> float:
    """Seconds between two looks into the folder in which the driver and whoever has submitted the stage meet."""
    return LOOK_REMOTE if "://" in folder else LOOK


def attempt_secret(secret: str, number: int) -> str:
    """Of the channel of one attempt, from that of the stage."""
    return hmac.new(bytes.fromhex(secret), f"attempt {number}".encode(), hashlib.sha256).hexdigest()


def _require_directory(stage: dict[str, Any]) -> None:
    directory = stage["directory"]
    try:
        with open(os.path.join(directory, "token")) as file:
            is_this = file.read() == stage["token"] and os.access(stage["folder"], os.W_OK)
    except OSError:
        is_this = False
    if not is_this:
        raise RuntimeError(f"{UNSEEN}: it does not see {directory}")


def _next_attempt(
    stage: dict[str, Any], last: int, driver: subprocess.Popen[bytes] | None
) -> tuple[int, dict[str, Any]] | None:
    """The number of the next attempt, and what its agents are told; None if there is none."""
    found = None
    if driver or not stage["relays"]:
        number = _await_attempt(stage, last, driver)
        if number is not None:
            with open(os.path.join(stage["tasks"], f"{ATTEMPT}{number}")) as file:
                found = number, json.load(file)
    if stage["relays"]:
        found = json.loads(_gather(json.dumps(found), stage, last, driver)[0])
    return found


def _await_attempt(stage: dict[str, Any], last: int, driver: subprocess.Popen[bytes] | None) -> int | None:
    """The number of the next attempt; None if there is none. The stage ends with the driver, and so does this."""
    began = time.monotonic()
    while True:
        names = _look(stage, driver)
        numbers = [int(name[len(ATTEMPT) :]) for name in names if name.startswith(ATTEMPT)]
        later = [number for number in numbers if number > last]
        if OVER in names:
            return None
        if later:
            return min(later)
        time.sleep(LOOK if time.monotonic() - began < PATIENCE else LONG_LOOK)


def _look(stage: dict[str, Any], driver: subprocess.Popen[bytes] | None) -> list[str]:
    """The names in the folder. Raises RuntimeError if the driver has ended, and not said that all is over."""
    # In this order: a driver that has ended has written what it had to say.
    code = driver.poll() if driver else None
    names = os.listdir(stage["tasks"])
    if code is None or OVER in names:
        return names
    if code == UNSEEN_CODE:
        with open(os.path.join(stage["tasks"], WHY)) as file:
            raise RuntimeError(f"{UNSEEN}: {file.read()}")
    raise RuntimeError(f"{DRIVER_ENDED} with exit code {code}")


def _hold_attempt(
    config: dict[str, Any],
    stage: dict[str, Any],
    number: int,
    told: dict[str, Any],
    driver: subprocess.Popen[bytes] | None,
) -> str:
    """Holds one agent to its end; what was wrong with it."""
    ended = threading.Event()

    def watch(agent: Any) -> None:
        if "tasks" in stage:
            arguments = (agent, driver, stage["tasks"], f"{CANCEL}{number}", ended)
            threading.Thread(target=_kill_on_request, args=arguments, daemon=True).start()

    own = {"secret": attempt_secret(stage["secret"], number)}
    own["restart_count"] = config["restart_count"] + number - stage["first_attempt"]
    try:
        hold({**config, **told, **own}, watch)
    except RuntimeError as failure:
        return str(failure)
    finally:
        ended.set()
    return ""


def _report_end(
    task: int, stage: dict[str, Any], number: int, error: str, driver: subprocess.Popen[bytes] | None
) -> None:
    """Says that this task's agent has ended; task 0 may have to do so for all tasks."""
    errors = {task: error}
    if stage["relays"]:
        if driver and OVER in _look(stage, driver) and error:
            # It began no attempt, and nobody else can reach the agents that wait for it: Spark can.
            raise RuntimeError(error)
        errors = dict(enumerate(_gather(error, stage, number, driver)))
    if "tasks" in stage:
        for ended, what in errors.items():
            put(stage["tasks"], f"{ENDED}{number}-{ended}", what)


def _gather(text: str, stage: dict[str, Any], number: int, driver: subprocess.Popen[bytes] | None) -> list[str]:
    """What each task of the stage says, as soon as all have; Spark takes a second for it."""
    from pyspark import BarrierTaskContext

    done = threading.Event()
    if driver:
        arguments = (driver, stage["tasks"], f"{CANCEL}{number}", done)
        threading.Thread(target=_end_if_stuck, args=arguments, daemon=True).start()
    try:
        return BarrierTaskContext.get().allGather(text)
    finally:
        done.set()


def _end_if_stuck(driver: subprocess.Popen[bytes], folder: str, cancel: str, done: threading.Event) -> None:
    """Ends this task, which waits for the others, if one of them does not end its agent."""
    while not done.wait(DRIVER_LOOK):
        if driver.poll() is not None or cancel in os.listdir(folder):
            if not done.wait(RELAY_TIMEOUT):
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            return


def _kill_on_request(
    agent: Any, driver: subprocess.Popen[bytes] | None, folder: str, name: str, ended: threading.Event
) -> None:
    """Kills the agent when the driver asks for that, or has ended: then the whole stage is to end, and soon.

    An agent that had an attempt is about to exit when all is over, and clears up; one that had none would wait on.
    """
    looks = 0
    while not ended.wait(DRIVER_LOOK):
        looks += 1
        with contextlib.suppress(OSError):
            has_died = driver is not None and driver.poll() is not None
            names = os.listdir(folder) if has_died or looks % LOOKS_PER_LISTING == 0 else []
            if OVER in names and ended.wait(DRIVER_EXIT_TIMEOUT):
                return
            if has_died or not {name, OVER}.isdisjoint(names):
                agent.kill()
                return


def put(folder: str, name: str, text: str) -> None:
    """Writes a file of the folder at once. Until then its name is none that anybody looks for, not even by a prefix."""
    with open(os.path.join(folder, f".{os.getpid()}-{name}"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))


def _start_driver(config: dict[str, Any], stage: dict[str, Any]) -> subprocess.Popen[bytes]:
    config["driver_code"] = code = tempfile.mkdtemp(prefix="rankzero-stage-", dir=scratch_root())
    env = dict(os.environ)
    if stage["relays"]:
        stage["tasks"] = code
        # Its credentials for the store are those of a rank.
        env |= config["env"]
    path = os.path.join(code, "rankzero.zip")
    with open(path, "wb") as file:
        file.write(config["code_zip"])
    with _open_log(stage) as log:
        driver = subprocess.Popen(
            [sys.executable, "-u", "-c", _DRIVER, path],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    holder = [os.getpid(), start_time(os.getpid())]
    told = {**stage, "env": config["env"], "host": config["host"], "holder": holder}
    assert driver.stdin
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(json.dumps(told).encode() + b"\n")
        driver.stdin.flush()
    return driver


def _open_log(stage: dict[str, Any]) -> IO[bytes]:
    """What a driver writes: a file of the run directory; where that is on an object store, the executor's own log."""
    if stage["relays"]:
        return os.fdopen(os.dup(sys.stderr.fileno()), "wb")
    return open(os.path.join(stage["directory"], "driver.log"), "ab")


def _end_driver(driver: subprocess.Popen[bytes], config: dict[str, Any]) -> None:
    """Waits for a driver that has said that all is over; one that has not is cut off."""
    assert driver.stdin
    with contextlib.suppress(OSError):
        driver.stdin.close()
    try:
        driver.wait(DRIVER_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
    shutil.rmtree(config["driver_code"], ignore_errors=True)
