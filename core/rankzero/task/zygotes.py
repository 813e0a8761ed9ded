"""Starts agents as forks of zygotes, and keeps idle zygotes for later launches of this process.

A zygote (`rankzero.task.zygote`) belongs to the process that holds its agents, by a pair of sockets. Like `hold`, this
module is pickled by value, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import IO, Any

from rankzero.task.scratch import PREFIX, make_scratch, scratch_root

START_TIMEOUT = 120.0  # The same for an agent without torch, whose interpreter may lie on a slow disk
END_TIMEOUT = 3.0  # Seconds for a zygote to end with its agent

PER_RUN = re.compile("RANKZERO_(RUN_ID|SCRATCH)|_?AIRFLOW_CTX_.*|DAGSTER_(RUN|PIPES)_.*|PYTEST_CURRENT_TEST")
"""Variables that differ between launches, and that no library reads while it is imported: all others make another
zygote."""

SHARED = "RANKZERO_ZYGOTE"
"""Environment variable with the path of a Unix socket, behind which a process forks a zygote for each connection. The
test suite sets it, whose thousands of processes would import torch otherwise."""

_WARM, _COLD, _ALONE = "warm", "cold", "alone"  # A zygote that imports torch, one that does not, an agent without one
_KEPT = "_rankzero_zygotes"  # Attribute of `sys`, since a Python worker of Spark unpickles this module for each task
_PACKAGES = re.compile(r"(site|dist)-packages$|\.(zip|egg)$")
_TAIL = 4096  # Bytes of what was printed last that an error shows

_BOOTSTRAP = "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; "
_BOOTSTRAP += "sys.path.append(sys.path.pop(0)); from rankzero.{} import main; main()"


class Zygote:
    """The owner's end of a zygote, whose agents import rankzero from the path ``code``, and the agent that it runs."""

    def __init__(self, channel: socket.socket, code: str) -> None:
        self._channel, self._code, self._replies = channel, code, channel.makefile("rb", 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_alone = self._runs = False
        self._directory: str | None = None
        self._agent, self.key, self.most = 0, "", 0

    @classmethod
    def start(cls, config: dict[str, Any], log: IO[bytes], kind: str) -> Zygote:
        """Starts a process, which can be sent a configuration immediately; ``log`` receives what it prints."""
        code, directory = config["code_path"], None
        if not code:
            directory = make_scratch(scratch_root(), PREFIX) if kind == _WARM else config["scratch"]
            code = os.path.join(directory, "rankzero.zip")
            with open(code, "wb") as file:
                file.write(config["code_zip"])
        ours, theirs = socket.socketpair()
        zygote = cls(ours, code)
        zygote._is_alone, zygote._directory = kind == _ALONE, directory if kind == _WARM else None
        with theirs:
            zygote._process = _start_process(config, code, zygote._directory or "", kind, theirs, log)
        return zygote

    def launch(self, settings: dict[str, Any], timeout: float) -> bool:
        """Makes the zygote fork an agent; returns False if it does not within ``timeout`` seconds."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(timeout)
            self._channel.sendall(json.dumps({**settings, "code_path": self._code}).encode() + b"\n")
            self._channel.settimeout(None)
            reply = {"pid": 0} if self._is_alone else self._reply(timeout)
            if reply is not None:
                self._agent, self._runs = reply["pid"], True
        return self._runs

    def _reply(self, timeout: float | None) -> dict[str, Any] | None:
        """Returns the next message; None if the zygote and its agent have exited, or in time none has come."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        with contextlib.suppress(OSError):
            if poll.poll(timeout and timeout * 1000) and (line := self._replies.readline()).endswith(b"\n"):
                message: dict[str, Any] = json.loads(line)
                return message
        return None

    def wait(self) -> int:
        """Waits for the agent and all that it has started; returns its exit code, negative for a signal."""
        if self._is_alone and self._process:
            code = self._process.wait()
        elif (reply := self._reply(None)) is not None:
            code = reply["status"]
        else:
            # The zygote was killed, and the agent has ended after it.
            code, self.most = -signal.SIGKILL, 0
        self._runs = False
        return int(code)

    def kill(self) -> None:
        """Kills the agent with all its descendants. To be called from any thread."""
        with contextlib.suppress(OSError):
            self._channel.send(b"%d\n" % self._agent)
        if self._process:
            self._process.send_signal(signal.SIGKILL if self._is_alone else signal.SIGCONT)

    def release(self) -> None:
        """Keeps the zygote for later launches; ends one that is not kept, or whose agent still runs."""
        if self._runs or not self.most:
            self.close(END_TIMEOUT)
            return
        idle, _ = _kept()
        idle.append(self)
        while len(idle) > self.most:
            # It may be importing something, and has no descendants.
            idle.pop(0).close(0.0)

    def close(self, timeout: float) -> None:
        """Ends the zygote, which gets this time to end its agent."""
        # Not only closed: a child that this process has forked may have a copy of it.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        if self._process:
            self._process.send_signal(signal.SIGCONT)
        while self._reply(timeout) is not None:
            pass
        if self._process:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._channel.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _start_process(
    config: dict[str, Any], code: str, directory: str, kind: str, channel: socket.socket, log: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    env = {**os.environ, **config["env"]}
    if kind == _WARM:
        # A check for GPUs that a library makes while it is imported must not open one.
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    elif kind == _ALONE:
        env = {**os.environ, "RANKZERO_SCRATCH": config["scratch"]}
    program = _BOOTSTRAP.format("agent.supervise" if kind == _ALONE else "task.zygote")
    command = [sys.executable, "-c", program, code, str(os.getpid()), directory, kind]
    return subprocess.Popen(command, stdin=channel.fileno(), stdout=log, stderr=log, start_new_session=True, env=env)


def start(config: dict[str, Any], log: IO[bytes]) -> Zygote:
    """Starts an agent as a fork of an idle zygote, else of a new one. Raises RuntimeError if none can be started.

    Args:
        config: The agent's configuration, with ``zygotes``, the most idle ones that this process keeps.
        log: A file in its directory for what it prints.
    """
    settings = {name: value for name, value in config.items() if name != "code_zip"}
    settings |= {"log": log.name, "environ": {**os.environ, "RANKZERO_SCRATCH": config["scratch"]}, "notes": []}
    kind = _COLD if _has_pidfds() else _ALONE
    if config["preload_timeout"] and kind == _COLD and (zygote := _start_warm(config, settings, log)):
        return zygote
    zygote = Zygote.start(config, log, kind)
    if not zygote.launch(settings, START_TIMEOUT):
        zygote.close(0.0)
        raise RuntimeError(f"rankzero agent of task {config['task']} did not start{printed(log)}")
    return zygote


def _start_warm(config: dict[str, Any], settings: dict[str, Any], log: IO[bytes]) -> Zygote | None:
    """Returns a zygote that has torch loaded and runs the agent; None leaves the reason in the agent's notes."""
    key, (idle, cold) = _key_of(config), _kept()
    for zygote in [zygote for zygote in idle if zygote.key == key]:
        with contextlib.suppress(ValueError):
            # Raises if another thread has taken it.
            idle.remove(zygote)
            # Another object: who has the first one may kill no later agent.
            again = copy.copy(zygote)
            if again.launch(settings, config["preload_timeout"]):
                return again
            again.close(0.0)
    if key in cold:
        return None
    for is_shared in (True, False):
        found = _connect(config) if is_shared else Zygote.start(config, log, _WARM)
        if found and found.launch(settings, config["preload_timeout"]):
            found.key, found.most = key, config.get("zygotes", 1)
            return found
        if found:
            found.close(0.0)
    cold.append(key)
    why = printed(log) or f": that took more than {config['preload_timeout']:g} s"
    settings["notes"] = [f"rankzero: torch could not be loaded ahead, so each rank of this process imports it{why}"]
    return None


def _connect(config: dict[str, Any]) -> Zygote | None:
    """Returns a zygote that another process of this user forks; None if there is no such process."""
    if not (address := config.get("ahead") or os.environ.get(SHARED)):
        return None
    channel = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        channel.connect(address)
        return Zygote(channel, config["code_path"] or "")
    channel.close()
    return None


def start_ahead(config: dict[str, Any]) -> str | None:
    """Starts a zygote that forks one for each process that connects to a socket, and ends with this process.

    Returns the socket's path, in a directory of this user alone; None if none can be made, or `SHARED` names one.
    """
    if SHARED in os.environ:
        return None
    directory = make_scratch(tempfile.gettempdir(), PREFIX)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path := os.path.join(directory, "zygote"))
            listener.listen()
            process = _start_process(config, config["code_path"], directory, _WARM, listener, subprocess.DEVNULL)
        except OSError:
            # Such as a path that is too long for a socket.
            shutil.rmtree(directory, ignore_errors=True)
            return None
    # It is not reaped before this process ends, which a Popen without a reference would complain about.
    process.returncode = 0
    return path


def _kept() -> tuple[list[Zygote], list[object]]:
    """Returns this process's idle zygotes, and the keys for which torch could not be loaded ahead."""
    # A forked child must not use those of its parent.
    idle, cold = vars(sys).setdefault(_KEPT, {}).setdefault(os.getpid(), ([], []))
    return idle, cold


def _key_of(config: dict[str, Any]) -> str:
    """Returns a key of everything that the state of a zygote depends on: launches with one key can share it."""
    env = {name: value for name, value in {**os.environ, **config["env"]}.items() if not PER_RUN.fullmatch(name)}
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    with open("/proc/self/status") as file:
        mask = [line for line in file if line.startswith("Umask:")]
    # Installing a package changes the directory that it is in.
    found = [place for place in sys.path if _PACKAGES.search(place) and os.path.exists(place)]
    packages = [(place, os.stat(place).st_mtime_ns) for place in found]
    code = config["code_path"] or hashlib.sha256(config["code_zip"]).hexdigest()
    inherited = [os.readlink("/proc/self/cwd"), mask, limits, sorted(os.sched_getaffinity(0))]
    facts = [sys.executable, code, packages, inherited, env]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _has_pidfds() -> bool:
    # Some kernels and sandboxes have none.
    with contextlib.suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        return sys.platform == "linux"
    return False


def printed(log: IO[bytes]) -> str:
    """Returns the end of what was printed into a log, for an error's message."""
    text = os.pread(log.fileno(), _TAIL, max(0, os.fstat(log.fileno()).st_size - _TAIL)).decode(errors="replace")
    return f": {text.strip()}" if text.strip() else ""
