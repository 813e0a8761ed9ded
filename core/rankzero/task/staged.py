"""A task of a stage whose task 0 runs the driver: it runs one agent for each attempt.

The caller is the process that submitted the stage. Driver, tasks and caller exchange files in a folder of the run
directory, which all of them see; no file holds a secret. If the run directory is on an object store, the tasks' folder
is on task 0's host, and task 0 relays between it and the other tasks by Spark's `allGather`: only the driver sends
requests to the store. Runs in Spark's Python worker, is pickled by value, and uses the standard library only.
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
"""File that the driver in the stage writes once it runs."""

GO = "go"
"""File that the caller writes once it has stopped writing into the run directory."""

ATTEMPT = "attempt-"
"""Prefix, before the attempt's number, of the file with the driver's address for agents. The first attempt's file is
written before the driver has claimed the run, so that agents start early and wait for it."""

CANCEL = "cancel-"
"""Prefix, before the attempt's number, of the file that requests to kill the agents of that attempt."""

ENDED = "ended-"
"""Prefix, before the numbers of attempt and task, of the file that reports the agent's end and holds its error."""

OVER = "over"
"""File that the driver writes when no attempt follows. The caller's copy holds the final status."""

UNSEEN = "rankzero: this executor cannot drive the run"
"""Part of the error of a task whose host does not see the run directory, or where no driver can listen."""

UNSEEN_CODE = 3
"""Exit code of a driver on a host that cannot drive the run."""

WHY = "unseen"
"""File in which such a driver writes the reason."""

DRIVER_ENDED = "rankzero: the driver of the run in task 0 ended"

POLL_INTERVAL = 0.02
REMOTE_POLL_INTERVAL = 0.1
"""Seconds between two polls by which driver and caller wait for each other; on an object store each is a request."""

SLOW_POLL_INTERVAL = 0.5
SLOW_AFTER = 5.0
"""Seconds between two listings of the folder for the next attempt, after `SLOW_AFTER` seconds. NFS caches for long that
a single name does not exist, and a listing avoids that."""

DRIVER_POLL_INTERVAL = 0.2
POLLS_PER_LISTING = 10
"""Seconds between two polls of the driver process, which cost nothing. Every tenth also lists the folder for a request
to kill the agent, since a thousand tasks may list it."""

ENDED_POLL_INTERVAL = 0.1
"""Seconds between two polls by the driver for the `ENDED` files of its agents."""

DRIVER_EXIT_TIMEOUT = 10.0
"""Seconds for the driver, and for agents, to exit once the driver has written `OVER`."""

RELAY_TIMEOUT = 30.0
"""Seconds for the other tasks to report the end of their agents, once the driver has cancelled them or has ended.
Then task 0 exits, so that Spark ends the stage: only Spark can end an agent that does not obey."""

_DRIVER = "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; "
_DRIVER += "sys.path.append(sys.path.pop(0)); from rankzero.driver.staged import main; main()"


def run_task(config: dict[str, Any]) -> None:
    """Runs one agent to its end, or one after the other for all attempts of a driver in this stage.

    Raises:
        RuntimeError: the agent or the driver crashed, or this host does not see the run directory.
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
            last, settings = found
            error = _run_agent(config, stage, last, settings, driver)
            _report_end(config["task"], stage, last, error, driver)
    finally:
        if driver:
            _end_driver(driver, config)


def poll_interval(folder: str) -> float:
    """Returns the seconds between two polls of the folder by which driver and caller wait for each other."""
    return REMOTE_POLL_INTERVAL if "://" in folder else POLL_INTERVAL


def attempt_secret(secret: str, number: int) -> str:
    """Returns the secret of one attempt's channel, derived from the stage's secret."""
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
    """Waits for the next attempt; returns its number and its agents' configuration, or None if none follows."""
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
    """Waits for the number of the next attempt, or None if none follows. Raises RuntimeError if the driver died."""
    began = time.monotonic()
    while True:
        names = _list_folder(stage, driver)
        numbers = [int(name[len(ATTEMPT) :]) for name in names if name.startswith(ATTEMPT)]
        later = [number for number in numbers if number > last]
        if OVER in names:
            return None
        if later:
            return min(later)
        time.sleep(POLL_INTERVAL if time.monotonic() - began < SLOW_AFTER else SLOW_POLL_INTERVAL)


def _list_folder(stage: dict[str, Any], driver: subprocess.Popen[bytes] | None) -> list[str]:
    """Lists the folder. Raises RuntimeError if the driver has exited without writing `OVER`."""
    # The driver's exit is polled first: the files of a driver that has exited are then complete in the listing.
    code = driver.poll() if driver else None
    names = os.listdir(stage["tasks"])
    if code is None or OVER in names:
        return names
    if code == UNSEEN_CODE:
        with open(os.path.join(stage["tasks"], WHY)) as file:
            raise RuntimeError(f"{UNSEEN}: {file.read()}")
    raise RuntimeError(f"{DRIVER_ENDED} with exit code {code}")


def _run_agent(
    config: dict[str, Any],
    stage: dict[str, Any],
    number: int,
    settings: dict[str, Any],
    driver: subprocess.Popen[bytes] | None,
) -> str:
    """Runs one agent to its end; returns its error, or an empty text."""
    ended = threading.Event()

    def watch(agent: Any) -> None:
        if "tasks" in stage:
            arguments = (agent, driver, stage["tasks"], f"{CANCEL}{number}", ended)
            threading.Thread(target=_kill_on_request, args=arguments, daemon=True).start()

    own = {"secret": attempt_secret(stage["secret"], number)}
    own["restart_count"] = config["restart_count"] + number - stage["first_attempt"]
    try:
        hold({**config, **settings, **own}, watch)
    except RuntimeError as failure:
        return str(failure)
    finally:
        ended.set()
    return ""


def _report_end(
    task: int, stage: dict[str, Any], number: int, error: str, driver: subprocess.Popen[bytes] | None
) -> None:
    """Reports the end of this task's agent; where task 0 relays, it reports for all tasks."""
    errors = {task: error}
    if stage["relays"]:
        if driver and OVER in _list_folder(stage, driver) and error:
            # The driver began no attempt, so the other agents wait for it; by this error Spark ends them.
            raise RuntimeError(error)
        errors = dict(enumerate(_gather(error, stage, number, driver)))
    if "tasks" in stage:
        for ended, what in errors.items():
            put(stage["tasks"], f"{ENDED}{number}-{ended}", what)


def _gather(text: str, stage: dict[str, Any], number: int, driver: subprocess.Popen[bytes] | None) -> list[str]:
    """Exchanges a text with all tasks of the stage by `allGather`, which takes a second; returns all texts by task."""
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
    """Exits this task, which waits for the others, if one of them does not end its agent in time."""
    while not done.wait(DRIVER_POLL_INTERVAL):
        if driver.poll() is not None or cancel in os.listdir(folder):
            if not done.wait(RELAY_TIMEOUT):
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            return


def _kill_on_request(
    agent: Any, driver: subprocess.Popen[bytes] | None, folder: str, name: str, ended: threading.Event
) -> None:
    """Kills the agent when the driver requests it or has exited.

    When the driver has written `OVER`, an agent gets time to exit by itself; one that had no attempt would wait on.
    """
    polls = 0
    while not ended.wait(DRIVER_POLL_INTERVAL):
        polls += 1
        with contextlib.suppress(OSError):
            has_died = driver is not None and driver.poll() is not None
            names = os.listdir(folder) if has_died or polls % POLLS_PER_LISTING == 0 else []
            if OVER in names and ended.wait(DRIVER_EXIT_TIMEOUT):
                return
            if has_died or not {name, OVER}.isdisjoint(names):
                agent.kill()
                return


def put(folder: str, name: str, text: str) -> None:
    """Writes a file of the folder atomically, by a temporary name that matches no name or prefix of this module."""
    with open(os.path.join(folder, f".{os.getpid()}-{name}"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))


def _start_driver(config: dict[str, Any], stage: dict[str, Any]) -> subprocess.Popen[bytes]:
    config["driver_code"] = code = tempfile.mkdtemp(prefix="rankzero-stage-", dir=scratch_root())
    env = dict(os.environ)
    if stage["relays"]:
        stage["tasks"] = code
        # The driver uses the ranks' credentials for the store.
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
    settings = {**stage, "env": config["env"], "host": config["host"], "holder": holder}
    assert driver.stdin
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(json.dumps(settings).encode() + b"\n")
        driver.stdin.flush()
    return driver


def _open_log(stage: dict[str, Any]) -> IO[bytes]:
    """Opens the driver's log: a file of the run directory, or, for one on an object store, the executor's log."""
    if stage["relays"]:
        return os.fdopen(os.dup(sys.stderr.fileno()), "wb")
    return open(os.path.join(stage["directory"], "driver.log"), "ab")


def _end_driver(driver: subprocess.Popen[bytes], config: dict[str, Any]) -> None:
    """Waits for the driver to exit, and kills it after `DRIVER_EXIT_TIMEOUT`."""
    assert driver.stdin
    with contextlib.suppress(OSError):
        driver.stdin.close()
    try:
        driver.wait(DRIVER_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
    shutil.rmtree(config["driver_code"], ignore_errors=True)
