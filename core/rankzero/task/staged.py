"""A task of a stage that has the driver of its run in task 0: it holds the agents of one attempt after the other.

Driver and tasks meet in a folder of the run directory, which all of them see; secrets are in none of its files. Runs in
Spark's Python worker, is pickled by value, and uses the standard library only.
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
from typing import Any

from rankzero.task.hold import hold, scratch_root
from rankzero.task.start import start_time

READY = "ready"
"""Written by the driver in the stage: it is there."""

GO = "go"
"""Written by whoever has submitted the stage: it writes nothing into the run directory any more."""

ATTEMPT = "attempt-"
"""Begins the name of the file, with the attempt's number, that says where agents find the driver."""

CANCEL = "cancel-"
"""The same: the agents of this attempt are to be killed."""

ENDED = "ended-"
"""With numbers of attempt and task: the agent has ended. Holds what was wrong."""

OVER = "over"
"""Written by the driver: there are no more attempts."""

UNSEEN = "rankzero: this executor does not see the run directory"
"""In the error of a task whose host has no such directory, or another one of that name."""

DRIVER_ENDED = "rankzero: the driver of the run in task 0 ended"

LOOK = 0.02
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
"""Seconds for the driver to end once it has said that all is over."""

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
    _require_directory(stage)
    driver = _start_driver(config, stage) if config["task"] == 0 else None
    last = -1
    try:
        while (number := _await_attempt(stage["folder"], last, driver)) is not None:
            _hold_attempt(config, stage, number, driver)
            last = number
    finally:
        if driver:
            _end_driver(driver, config)


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
        raise RuntimeError(f"{UNSEEN} {directory}")


def _await_attempt(folder: str, last: int, driver: subprocess.Popen[bytes] | None) -> int | None:
    """The number of the next attempt; None if there is none. The stage ends with the driver, and so does this."""
    began = time.monotonic()
    while True:
        # In this order: a driver that has ended has written what it had to say.
        code = driver.poll() if driver else None
        names = os.listdir(folder)
        numbers = [int(name[len(ATTEMPT) :]) for name in names if name.startswith(ATTEMPT)]
        later = [number for number in numbers if number > last]
        if OVER in names:
            return None
        if later:
            return min(later)
        if code is not None:
            raise RuntimeError(f"{DRIVER_ENDED} with exit code {code}")
        time.sleep(LOOK if time.monotonic() - began < PATIENCE else LONG_LOOK)


def _hold_attempt(
    config: dict[str, Any], stage: dict[str, Any], number: int, driver: subprocess.Popen[bytes] | None
) -> None:
    folder, task = stage["folder"], config["task"]
    with open(os.path.join(folder, f"{ATTEMPT}{number}")) as file:
        told = json.load(file)
    ended = threading.Event()
    error = ""
    try:
        secret = attempt_secret(stage["secret"], number)
        hold(
            {**told, **config, "secret": secret},
            lambda agent: threading.Thread(
                target=_kill_on_request, args=(agent, driver, folder, f"{CANCEL}{number}", ended), daemon=True
            ).start(),
        )
    except RuntimeError as failure:
        error = str(failure)
    finally:
        ended.set()
    put(folder, f"{ENDED}{number}-{task}", error)


def _kill_on_request(
    agent: Any, driver: subprocess.Popen[bytes] | None, folder: str, name: str, ended: threading.Event
) -> None:
    """Kills the agent when the driver asks for that, or has ended: then the whole stage is to end, and soon."""
    looks = 0
    while not ended.wait(DRIVER_LOOK):
        looks += 1
        with contextlib.suppress(OSError):
            is_asked = looks % LOOKS_PER_LISTING == 0 and name in os.listdir(folder)
            if is_asked or (driver and driver.poll() is not None):
                agent.kill()
                return


def put(folder: str, name: str, text: str) -> None:
    """Writes a file of the folder at once."""
    path = os.path.join(folder, name)
    with open(f"{path}.new-{os.getpid()}", "w") as file:
        file.write(text)
    os.rename(file.name, path)


def _start_driver(config: dict[str, Any], stage: dict[str, Any]) -> subprocess.Popen[bytes]:
    config["driver_code"] = code = tempfile.mkdtemp(prefix="rankzero-driver-", dir=scratch_root())
    path = os.path.join(code, "rankzero.zip")
    with open(path, "wb") as file:
        file.write(config["code_zip"])
    with open(os.path.join(stage["directory"], "driver.log"), "ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-u", "-c", _DRIVER, path],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    holder = [os.getpid(), start_time(os.getpid())]
    told = {**stage, "env": config["env"], "host": config["host"], "holder": holder}
    assert driver.stdin
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(json.dumps(told).encode() + b"\n")
        driver.stdin.flush()
    return driver


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
