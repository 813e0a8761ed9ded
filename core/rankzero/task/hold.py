"""Starts an agent and waits for it. The agent ends when this process dies.

Like `start`, this runs in Spark's Python worker or in the driver, is pickled by value, and uses the standard library
only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rankzero.task.start import start_fresh, start_time, start_warm

AGENT_EXIT_TIMEOUT = 3.0  # Seconds for an agent to exit once its standard input is closed
ABANDONED_AFTER = 60.0  # Seconds since its last change for which a directory may be unlocked: it has just been created

SOCKET_PATH_ROOM = 74
"""Most characters of a temporary directory's path for multiprocessing's sockets (33 of 107) to fit below it."""

PREFIX = "rankzero-agent-"

_TAIL = 4096  # Bytes of an agent's last output that its error shows
MARKER = "RANKZERO_AGENT"  # Environment variable by which all processes that an agent has started are found


def hold(config: dict[str, Any], on_start: Callable[[Any], None] | None = None) -> None:
    """Runs one agent to its end.

    Args:
        config: The agent's configuration, which it reads from its standard input, and what is needed to start it.
        on_start: Receives the started process (a ``subprocess.Popen``, or a ``WarmAgent`` with the same methods).

    The agent watches its standard input and this process; when this process dies in any way, the agent ends its
    workers. Standard input alone would not do: a child that this process has forked keeps the other end open, too.

    Raises:
        RuntimeError: the agent crashed; the message has the end of its output.
    """
    marker = secrets.token_hex(8)
    scratch = make_scratch(scratch_root(), PREFIX)
    temporary = _temporary(scratch)
    locks = [lock_directory(directory) for directory in (scratch, temporary) if directory]
    # A file without a name: an agent removes its directory when it ends, and the log is read after that.
    log = tempfile.TemporaryFile(dir=scratch)
    config = {**config, "env": with_defaults(config), "temporary": temporary}
    # First, so that the marker is visible even if the environment is cut off (see `forked`).
    own = {MARKER: marker, "RANKZERO_SCRATCH": scratch}
    env = {**own, **os.environ, **own}
    try:
        agent: Any = start_warm(config, log.fileno(), env)
        code = _place_code(config, scratch) if agent is None else ""
        if agent is None:
            agent = start_fresh(code, log.fileno(), env)
        settings = {key: value for key, value in config.items() if key != "code_zip"}
        try:
            with contextlib.suppress(BrokenPipeError):
                settings |= {"scratch": scratch, "code_path": code, "holder": _this_process()}
                agent.stdin.write(json.dumps(settings).encode() + b"\n")
                agent.stdin.flush()
            if on_start:
                on_start(agent)
            code_of_agent = agent.wait()
            if code_of_agent < 0:
                # The guard may have been killed instead of the agent, which then ends by itself.
                _await_closed(agent.stdin)
        finally:
            # Reached early when this process is interrupted: end of file ends the agent.
            with contextlib.suppress(OSError):
                agent.stdin.close()
            try:
                agent.wait(AGENT_EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
            if agent.returncode != 0:
                _kill_marked(f"{MARKER}={marker}")
        if code_of_agent != 0:
            tail = os.pread(log.fileno(), _TAIL, max(0, os.fstat(log.fileno()).st_size - _TAIL))
            text = tail.decode(errors="replace").strip()
            how = f"signal {-code_of_agent}" if code_of_agent < 0 else f"exit code {code_of_agent}"
            raise RuntimeError(
                f"rankzero agent of task {config['task']} ended by {how}" + (f": {text}" if text else "")
            )
    finally:
        log.close()
        for directory in (scratch, temporary):
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
        for lock in locks:
            os.close(lock)


def lock_directory(path: str) -> int:
    """Locks a directory for as long as this process lives; returns the descriptor that holds the lock."""
    lock = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def make_scratch(root: str, prefix: str) -> str:
    """Creates a directory of this process, after `remove_abandoned`. Raises OSError."""
    marks = _marks()
    remove_abandoned(root, prefix, marks)
    return tempfile.mkdtemp(prefix=f"{prefix}{''.join(marks)}-", dir=root)


def remove_abandoned(root: str, prefix: str, marks: tuple[str, str] | None = None) -> None:
    """Removes the directories of processes of this host that were killed: those that no process has locked.

    The lock decides, and no process id, since processes of several containers may share the root. On some file servers
    a lock holds only on its own host, so directories of other hosts stay.

    Args:
        root: The directory that holds them; nothing is removed if it cannot be listed.
        prefix: The beginning of their names, which the host's marks follow.
        marks: The result of `_marks`, if it is known.
    """
    boot, host = marks or _marks()
    # This kernel's, and those of this host before a reboot.
    ours = re.compile(rf"{re.escape(prefix)}({boot}\w{{6}}|\w{{6}}{host})-")
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(root) if ours.match(name)]
    for name in names:
        # Directories of other users may be there, too.
        with contextlib.suppress(OSError):
            directory = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(directory).st_mtime > ABANDONED_AFTER:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.join(root, name), ignore_errors=True)
            finally:
                os.close(directory)


def _marks() -> tuple[str, str]:
    """Returns six digits for the running kernel, and six for the name of the host."""
    boot = ""
    # Not on macOS.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read()
    kernel, host = (hashlib.sha256(text.encode()).hexdigest()[:6] for text in (boot, socket.gethostname()))
    return kernel, host


def scratch_root() -> str:
    """Returns a writable directory: ``TMPDIR``, else Spark's local directory with most free space, else ``/tmp``.

    Raises:
        RuntimeError: no directory is writable.
    """
    set_by_user = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    for_spark = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    usable = [place for place in set_by_user if _is_writable(place)][:1]
    if not usable:
        spark = [place for place in for_spark if _is_writable(place)]
        usable = sorted(spark, key=lambda place: shutil.disk_usage(place).free)[-1:]
    try:
        return usable[0] if usable else tempfile.gettempdir()
    except FileNotFoundError:
        raise RuntimeError(
            f"no directory on {socket.gethostname()} can be written (tried TMPDIR, SPARK_LOCAL_DIRS="
            f"{os.environ.get('SPARK_LOCAL_DIRS', '')!r}, /tmp, /var/tmp): mount one, and name it in spark.local.dir "
            "or TMPDIR"
        ) from None


def _is_writable(place: str) -> bool:
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def _temporary(scratch: str) -> str | None:
    """Creates the directory for the ranks' temporary files, removed with the agent; None keeps the system's own."""
    below = os.path.join(scratch, "tmp")
    if len(below) <= SOCKET_PATH_ROOM:
        os.mkdir(below)
        return below
    try:
        apart = make_scratch(tempfile.gettempdir(), PREFIX)
    except FileNotFoundError:
        # The path of a socket may be too long there, but no other directory is writable.
        os.mkdir(below)
        return below
    if len(apart) <= SOCKET_PATH_ROOM:
        return apart
    os.rmdir(apart)
    return None


def with_defaults(config: dict[str, Any]) -> dict[str, str]:
    """Returns the user's variables and rankzero's defaults for those that neither the user nor this host sets."""
    cores = config["cores"] or os.cpu_count() or 1
    # Forks of a warm server share its hash seed. With one seed everywhere, sets of texts have one order on all ranks.
    defaults = {
        "PYTHONIOENCODING": "utf-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(max(1, cores // config["workers"])),
    }
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **config["env"]}


def _this_process() -> list[Any] | None:
    """Returns the id and start time of this process; None where the kernel does not report it."""
    try:
        return [os.getpid(), start_time(os.getpid())]
    except OSError:
        return None


def _place_code(config: dict[str, Any], scratch: str) -> str:
    """Returns the path from which the agent's interpreter imports rankzero."""
    if config["code_path"]:
        return str(config["code_path"])
    path = os.path.join(scratch, "rankzero.zip")
    with open(path, "wb") as file:
        file.write(config["code_zip"])
    return path


def _await_closed(pipe: Any) -> None:
    """Waits until no process has the other end of a pipe open, at most `AGENT_EXIT_TIMEOUT`."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll(AGENT_EXIT_TIMEOUT * 1000)


def _kill_marked(marker: str) -> None:
    """Kills the processes that carry the marker of an agent, for an agent that was killed together with its guard."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/environ", "rb") as file:
            if marker.encode() in file.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
