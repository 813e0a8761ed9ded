"""A task of a stage whose task 0 runs the driver: it runs one agent for each attempt.

Driver and tasks exchange files in a folder of the run directory, which all of them see; no file holds a secret in plain
text. Runs in Spark's Python worker, is pickled by value, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from rankzero.bounds import POLL_INTERVAL_LONG, POLL_INTERVAL_LONGEST
from rankzero.task.hold import BOOTSTRAP, Directory, Process, hold

# Prefixes of files, before the number of the attempt (and the task):
ATTEMPT = "attempt-"  # The driver's, with the configuration of the agents
CANCEL = "cancel-"  # The driver's request to kill them
ENDED = "ended-"  # A task's report of its agent's end, with its error
OVER = "over"  # File that task 0 writes when the driver has exited after the end of the run


def run_task(config: dict[str, Any]) -> None:
    """Runs one agent after the other, one for each attempt of the driver in this stage.

    Raises:
        RuntimeError: the driver failed, or this host does not see the run directory.
    """
    stage, task = config.pop("stage"), config["task"]
    if not (os.path.isdir(stage["folder"]) and os.access(stage["folder"], os.W_OK)):  # Its name has random digits
        raise RuntimeError(f"rankzero: an executor does not see {stage['directory']}")
    attempt = -1
    with contextlib.closing(Directory("agent")) as code:
        driver = _start_driver(config, stage, code) if task == 0 else None
        try:
            while (found := _next_attempt(stage["folder"], attempt, driver)) is not None:
                attempt = found
                put(stage["folder"], f"{ENDED}{attempt}-{task}", _run_agent(config, stage, attempt, driver))
        finally:
            if driver:
                driver.kill()
                driver.wait()


def sealed(secret: str, stage_secret: str, attempt: int) -> str:
    """Encrypts the secret of one attempt's channel, or decrypts it, by a pad that no other attempt uses."""
    pad = hmac.new(bytes.fromhex(stage_secret), f"attempt {attempt}".encode(), hashlib.sha256).digest()
    return bytes(one ^ other for one, other in zip(bytes.fromhex(secret), pad, strict=True)).hex()


def put(folder: str, name: str, text: str) -> None:
    """Writes a file of the folder atomically, by a temporary name that matches no name or prefix of this module."""
    with open(os.path.join(folder, f".{os.getpid()}-{name}"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))


def _start_driver(config: dict[str, Any], stage: dict[str, Any], code: Directory) -> Process:
    command = [sys.executable, "-u", "-c", BOOTSTRAP.format("driver.main", "main_in_stage")]
    command.append(code.put("rankzero.zip", config["code_zip"]))
    with open(os.path.join(os.path.dirname(stage["folder"]), "driver.log"), "ab") as log:
        driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=[code.log.fileno()]
        )
    settings = {**stage, "env": config["env"], "host": config["host"]}
    assert driver.stdin
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(json.dumps(settings).encode() + b"\n")
        driver.stdin.flush()
    return driver


def _next_attempt(folder: str, last: int, driver: Process | None) -> int | None:
    """Waits for the number of the next attempt, or None if none follows. Raises RuntimeError if the driver failed."""
    while True:
        code = driver.poll() if driver else None
        if code == 0:
            put(folder, OVER, "")
        elif code is not None:
            raise RuntimeError(f"rankzero: the driver of the run, beside task 0, ended with exit code {code}")
        # NFS caches for long that a single name does not exist, and a listing avoids that.
        names = os.listdir(folder)
        if OVER in names:
            return None
        newest = max((int(name[len(ATTEMPT) :]) for name in names if name.startswith(ATTEMPT)), default=last)
        if newest > last:
            return newest
        time.sleep(POLL_INTERVAL_LONG)


def _run_agent(config: dict[str, Any], stage: dict[str, Any], attempt: int, driver: Process | None) -> str:
    """Runs one agent to its end; returns its error, or an empty text."""
    with open(os.path.join(stage["folder"], f"{ATTEMPT}{attempt}")) as file:
        settings = json.load(file)
    settings["secret"] = sealed(settings["secret"], stage["secret"], attempt)
    requests, ended = {f"{CANCEL}{attempt}", OVER}, threading.Event()

    def kill_on_request(agent: Any) -> None:
        while not ended.wait(POLL_INTERVAL_LONGEST):
            with contextlib.suppress(OSError):
                if (driver and driver.poll() is not None) or not requests.isdisjoint(os.listdir(stage["folder"])):
                    agent.kill()
                    return

    try:
        hold({**config, **settings}, lambda agent: threading.Thread(target=kill_on_request, args=[agent]).start())
    except RuntimeError as failure:
        return str(failure)
    finally:
        ended.set()
    return ""
