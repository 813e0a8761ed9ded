"""Starts agents as forks of zygotes, and keeps an idle zygote for later launches of this process.

A zygote (`rankzero.task.zygote`) belongs to the process that holds its agents, by a pair of sockets. Like `hold`, this
module is pickled by value, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
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
import weakref
from collections.abc import Iterator
from typing import IO, Any

from rankzero.task.scratch import make_scratch, scratch_root

START_TIMEOUT = 120.0  # Seconds for an agent without torch to start, whose interpreter may lie on a slow disk
END_TIMEOUT = 3.0  # Seconds for a zygote to end with its agent

PER_RUN = re.compile("RANKZERO_(RUN_ID|SCRATCH)|_?AIRFLOW_CTX_.*|DAGSTER_(RUN|PIPES)_.*|PYTEST_CURRENT_TEST")
"""Variables that differ between launches, and that no library reads while it is imported: all others make another
zygote."""

SHARED = "RANKZERO_ZYGOTE"
"""Environment variable with the path of a Unix socket, behind which a process forks a zygote for each connection. The
test suite sets it, whose thousands of processes would import torch otherwise."""

_WARM, _COLD = "warm", "cold"  # A zygote that imports torch, and one that does not
_KEPT = "_rankzero_zygotes"  # Attribute of `sys`, since a Python worker of Spark unpickles this module for each task
_PACKAGES = re.compile(r"(site|dist)-packages$|\.(zip|egg)$")
_TAIL = 4096  # Bytes of what was printed last that an error shows

BOOTSTRAP = (
    "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; sys.path.append(sys.path.pop(0)); "
    "from rankzero.{} import {} as main; main()"
)
"""The program of a process that calls a function of rankzero, from the path that is its first argument."""


class Agent:
    """An agent that a zygote runs."""

    def __init__(self, pid: int, zygote: subprocess.Popen[bytes] | None) -> None:
        self._pid, self._zygote, self._pidfd = pid, zygote, -1
        self.has_ended = False
        # It may have ended already; and some systems have none.
        with contextlib.suppress(OSError, AttributeError):
            self._pidfd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._pidfd)

    def kill(self) -> None:
        """Kills the agent, unless it has ended; its zygote ends its descendants. To be called from any thread."""
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif not self.has_ended:
                os.kill(self._pid, signal.SIGKILL)
        if self._zygote:
            # It may be stopped.
            self._zygote.send_signal(signal.SIGCONT)


class Zygote:
    """The owner's end of a zygote, and the agent that it runs."""

    def __init__(self, channel: socket.socket, code: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Takes the socket to a process whose agents import rankzero from the path ``code``."""
        self._channel, self._code, self._replies, self._process = channel, code, channel.makefile("rb", 0), process
        self.agent: Agent | None = None
        """The agent, until it has ended."""
        self.key, self.most, self.directory = "", 0, ""

    def launch(self, settings: dict[str, Any], timeout: float) -> bool:
        """Makes the zygote fork an agent; returns False if it does not within ``timeout`` seconds."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(timeout)
            self._channel.sendall(json.dumps({**settings, "code_path": self._code}).encode() + b"\n")
            self._channel.settimeout(None)
            if reply := self._reply(timeout):
                self.agent = Agent(reply["pid"], self._process)
        return self.agent is not None

    def _reply(self, timeout: float | None) -> dict[str, int] | None:
        """Returns the next message; None if the zygote and its agent have exited, or in time none has come."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        with contextlib.suppress(OSError):
            if poll.poll(timeout and timeout * 1000) and (line := self._replies.readline()).endswith(b"\n"):
                message: dict[str, int] = json.loads(line)
                return message
        return None

    def wait(self) -> int:
        """Waits for the agent and all that it has started; returns its exit code, negative for a signal."""
        reply = self._reply(None)
        if self.agent:
            self.agent.has_ended, self.agent = True, None
        if reply is None:
            # The zygote was killed, and the agent has ended after it.
            self.most = 0
            return -signal.SIGKILL
        return reply["status"]

    def release(self) -> None:
        """Keeps the zygote for later launches; ends one that is not kept, or whose agent still runs."""
        if self.agent or not self.most:
            self.close(END_TIMEOUT)
            return
        idle, _ = _kept()
        idle.append(self)
        while len(idle) > self.most:
            # It may be importing something, and has no descendants.
            idle.pop(0).close(0.0)

    def close(self, timeout: float) -> None:
        """Ends the zygote; its agent gets this time to end, and then the zygote to end what a killed agent leaves."""
        # Not only closed: a child that this process has forked may have a copy of it.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        if self._process:
            self._process.send_signal(signal.SIGCONT)
        for _ in range(2):
            while self._reply(timeout) is not None:
                self.agent = None
            if self.agent:
                self.agent.kill()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._channel.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def start(config: dict[str, Any], log: IO[bytes]) -> Zygote:
    """Starts an agent as a fork of an idle zygote, else of a new one. Raises RuntimeError if none can be started.

    Args:
        config: The agent's configuration, with ``zygotes``, the most idle ones that this process keeps.
        log: A file in its directory for what it prints.
    """
    settings = {name: value for name, value in config.items() if name != "code_zip"}
    settings |= {"log": log.name, "environ": {**os.environ, "RANKZERO_SCRATCH": config["scratch"]}, "notes": []}
    # Elsewhere a process that has torch loaded cannot be forked.
    if config["preload_timeout"] and sys.platform == "linux" and (zygote := _start_warm(config, settings, log)):
        return zygote
    zygote = _start_zygote(config, _COLD, log)
    if not zygote.launch(settings, START_TIMEOUT):
        zygote.close(0.0)
        raise RuntimeError(f"rankzero agent of task {config['task']} did not start{printed(log)}")
    return zygote


def _start_warm(config: dict[str, Any], settings: dict[str, Any], log: IO[bytes]) -> Zygote | None:
    """Returns a zygote that has torch loaded and runs the agent; None leaves the reason in the agent's notes."""
    key, (_, cold) = _key_of(config), _kept()
    for zygote in _candidates(config, key, log):
        if zygote.launch(settings, config["preload_timeout"]):
            zygote.key, zygote.most = key, config.get("zygotes", 1)
            return zygote
        zygote.close(0.0)
    if key not in cold:
        cold.append(key)
        why = printed(log) or f": that took more than {config['preload_timeout']:g} s"
        settings["notes"] = [f"rankzero: torch could not be loaded ahead, so each rank of this process imports it{why}"]
    return None


def _candidates(config: dict[str, Any], key: str, log: IO[bytes]) -> Iterator[Zygote]:
    """Yields an idle zygote, one that another process of this user forks, and a new one."""
    idle, cold = _kept()
    for zygote in [zygote for zygote in idle if zygote.key == key]:
        try:
            idle.remove(zygote)
        except ValueError:
            # Another thread has taken it.
            continue
        yield zygote
    if key in cold:
        return
    if address := config.get("ahead") or os.environ.get(SHARED):
        channel = socket.socket(socket.AF_UNIX)
        # Such a process may have ended.
        with contextlib.suppress(OSError):
            channel.connect(address)
        yield Zygote(channel, config["code_path"] or "")
    yield _start_zygote(config, _WARM, log)


def _start_zygote(config: dict[str, Any], kind: str, log: IO[bytes]) -> Zygote:
    """Starts a process that can be sent a configuration immediately; ``log`` receives what it prints."""
    directory = make_scratch(scratch_root()) if kind == _WARM else config["scratch"]
    ours, theirs = socket.socketpair()
    with theirs:
        zygote = Zygote(ours, *_start_process(config, kind, directory, theirs, log))
    if kind == _WARM:
        zygote.directory = directory
    return zygote


def _start_process(
    config: dict[str, Any], kind: str, directory: str, stdin: socket.socket, log: IO[bytes] | int
) -> tuple[str, subprocess.Popen[bytes]]:
    """Starts a process; returns the path of its code, which is in the directory unless this host has it, and it."""
    if not (code := config["code_path"]):
        code = os.path.join(directory, "rankzero.zip")
        with open(code, "wb") as file:
            file.write(config["code_zip"])
    env = os.environ | config["env"]
    if kind == _WARM:
        # A check for GPUs that a library makes while it is imported must not open one.
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    own = directory if kind == _WARM else ""
    command = [sys.executable, "-c", BOOTSTRAP.format("task.zygote", "main"), code, str(os.getpid()), own, kind]
    process = subprocess.Popen(command, stdin=stdin.fileno(), stdout=log, stderr=log, start_new_session=True, env=env)
    return code, process


def start_ahead(config: dict[str, Any]) -> str | None:
    """Starts a zygote that forks one for each process that connects to a socket, and ends with this process.

    Returns the socket's path, in a directory of this user alone; None if none can be made, or `SHARED` names one.
    """
    if SHARED in os.environ:
        return None
    directory = make_scratch(tempfile.gettempdir())
    path = os.path.join(directory, "zygote")
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path)
            listener.listen()
            _, process = _start_process(config, _WARM, directory, listener, subprocess.DEVNULL)
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
        inherited = [line for line in file if line.startswith(("Umask:", "Cpus_allowed:"))]
    # Installing a package changes the directory that it is in.
    found = [place for place in sys.path if _PACKAGES.search(place) and os.path.exists(place)]
    packages = [(place, os.stat(place).st_mtime_ns) for place in found]
    code = config["code_path"] or hashlib.sha256(config["code_zip"]).hexdigest()
    facts = [sys.executable, code, packages, os.readlink("/proc/self/cwd"), inherited, limits, env]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def printed(log: IO[bytes]) -> str:
    """Returns the end of what was printed into a log, for an error's message."""
    text = os.pread(log.fileno(), _TAIL, max(0, os.fstat(log.fileno()).st_size - _TAIL)).decode(errors="replace")
    return f": {text.strip()}" if text.strip() else ""
