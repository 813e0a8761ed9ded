"""Holds an agent: starts it as a fork of a `zygote`, waits for its end, and keeps the zygote for later launches."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from typing import IO, Any

START_TIMEOUT = 120.0  # Seconds for an agent without torch to start, whose interpreter may lie on a slow disk
END_TIMEOUT = 3.0  # Seconds for a zygote to end with its agent
ABANDONED_AFTER = 60.0  # Seconds after which the lock of a directory decides: one may just have been created

PER_RUN = re.compile(
    "RANKZERO_(RUN_ID|SCRATCH)|_?AIRFLOW_CTX_.*|DAGSTER_(RUN|PIPES)_.*|PYTEST_CURRENT_TEST|"
    "_?SPARK_.*|_?PYSPARK_(DRIVER_.*|PYTHON)|PYTHON_(DAEMON|UDF|WORKER)_.*|JAVA_HOME|SHLVL|(OLD)?PWD|_"
)
"""Variables that differ between launches, and that no library reads while it is imported. Others need other zygotes."""

_SPARKS = re.compile(r"/(pyspark\.zip|py4j-[^/]+\.zip|spark-core_[^/]+\.jar)$")  # Spark's own places in PYTHONPATH

SHARED = "RANKZERO_ZYGOTE"  # Variable with the path of a socket as `start_zygote` makes it, for all of the test suite
_KEPT = "_rankzero_zygotes"  # Attribute of `sys`, since a Python worker of Spark unpickles this module for each task

BOOTSTRAP = (
    "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; sys.path.append(sys.path.pop(0)); "
    "from rankzero.{} import {} as main; main()"
)
"""The program of a process that calls a function of rankzero, from the path that is its first argument."""

Process = subprocess.Popen[bytes]


def hold(config: dict[str, Any], on_start: Callable[[Any], None] = lambda agent: None) -> None:
    """Runs one agent to its end; ``on_start`` receives it, and its ``kill`` ends it from any thread.

    The agent and its zygote watch this process; when it dies in any way, the agent ends its workers.

    Raises:
        RuntimeError: the agent crashed; the message has the end of its output.
    """
    with contextlib.closing(Directory("agent")) as scratch:
        zygote = _start({**config, "env": with_defaults(config), "scratch": scratch.path}, scratch.log)
        try:
            on_start(zygote.agent)
            scratch.sweep()  # While the agent begins: a large folder would delay it
            code = zygote.wait()
        finally:
            zygote.release()
        # An agent that the driver has asked to end after a success must not fail its task: others still exit.
        if code != 0 and not os.path.exists(os.path.join(scratch.path, "agreed")):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RuntimeError(f"rankzero agent of task {config['task']} ended by {how}{_printed(scratch.log)}")


def with_defaults(config: dict[str, Any]) -> dict[str, str]:
    """Returns the user's variables and rankzero's defaults for those that neither the user nor this host sets."""
    cores = config["cores"] or os.cpu_count() or 1
    # Forks of a zygote share its hash seed. With one seed everywhere, sets of texts have one order on all ranks.
    defaults = {"PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0"}
    defaults["OMP_NUM_THREADS"] = str(max(1, cores // config["workers"]))
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **config["env"]}


class Directory:
    """A new temporary directory, which stays as long as a process holds the lock of its file ``log``.

    It is in ``TMPDIR``, else in Spark's local directory with most free space, else in ``/tmp``.
    """

    def __init__(self, kind: str) -> None:
        places = [] if os.environ.get("TMPDIR") else os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        places = [place for place in places if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)]
        root = max(places, key=lambda place: shutil.disk_usage(place).free) if places else tempfile.gettempdir()
        # On some file servers a lock holds only on its own host, and containers that share a place see no processes.
        name = f"rankzero-{kind}-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}-"
        self.path = tempfile.mkdtemp(prefix=name, dir=root)
        # Kept open: an agent removes its directory when it ends, and the log is read after that.
        self.log = open(os.path.join(self.path, "log"), "w+b")
        with contextlib.suppress(OSError):  # Without locks, directories that are left stay
            fcntl.flock(self.log, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def sweep(self) -> None:
        """Removes those of this kind that killed processes of this host have left, none in use or another user's."""
        for left in glob.glob(glob.escape(self.path.rpartition("-")[0]) + "-*"):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(left).st_mtime > ABANDONED_AFTER:
                    with open(os.path.join(left, "log"), "ab") as log:
                        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(left, ignore_errors=True)

    def put(self, name: str, data: bytes) -> str:
        """Writes a file; returns its path."""
        with open(os.path.join(self.path, name), "wb") as file:
            file.write(data)
        return file.name

    def close(self) -> None:
        """Removes it with all that is in it."""
        self.log.close()
        shutil.rmtree(self.path, ignore_errors=True)


class Agent:
    """An agent that a zygote runs."""

    def __init__(self, pid: int, zygote: Process | None) -> None:
        self._pid, self._zygote, self._pidfd, self.has_ended = pid, zygote, -1, False
        try:
            self._pidfd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._pidfd)
        except (OSError, AttributeError) as error:  # Some systems have none
            self.has_ended = isinstance(error, ProcessLookupError)

    def kill(self) -> None:
        """Kills the agent, unless it has ended, from any thread; its zygote, which may be stopped, ends the rest."""
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif not self.has_ended:
                os.kill(self._pid, signal.SIGKILL)
        if self._zygote:
            self._zygote.send_signal(signal.SIGCONT)


class Zygote:
    """The owner's end of a zygote, and the agent that it runs."""

    def __init__(
        self, channel: socket.socket, code: str, process: Process | None = None, directory: Directory | None = None
    ) -> None:
        """Takes the socket to a process whose agents import rankzero from the path ``code``."""
        self._channel, self._replies, self._code = channel, channel.makefile("rb", 0), code
        self._process, self._directory, self.path = process, directory, directory and directory.path
        self.agent: Agent | None = None  # Until it has ended
        self.key, self.most = "", 0

    def launch(self, settings: dict[str, Any], timeout: float) -> bool:
        """Makes the zygote fork an agent; returns False if it does not within ``timeout`` seconds."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(timeout)
            self._channel.sendall(json.dumps({**settings, "code_path": self._code}).encode() + b"\n")
            # The zygote may just say that its last agent was killed after its last act.
            if (reply := self._reply(timeout)) and "pid" in reply:
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
        # Without a reply the zygote was killed, and the agent has ended after it.
        code = -signal.SIGKILL if reply is None else reply["status"]
        self.most = 0 if code else self.most  # The zygote ends, too
        return code

    def release(self) -> None:
        """Keeps the zygote for later launches; ends one that is not kept, or whose agent still runs."""
        most = 0 if self.agent else self.most
        idle = _kept()[0] if most else []
        idle.append(self)
        while len(idle) > most:
            idle.pop(0).close()

    def close(self) -> None:
        """Ends the zygote; its agent gets time to end, and then the zygote to end what a killed agent leaves."""
        # Not only closed: a child that this process has forked may have a copy of it.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        if self._process and self.agent:
            self._process.send_signal(signal.SIGCONT)
        for _ in range(2):
            if self.agent and self._reply(END_TIMEOUT):
                self.agent = None
            elif self.agent:
                self.agent.kill()
        if self._process and self._directory:
            self._process.kill()
            self._process.wait()
            self._directory.close()
        self._replies.close()
        self._channel.close()


def _start(config: dict[str, Any], log: IO[bytes]) -> Zygote:
    """Starts an agent as a fork of an idle zygote, else of a new one. Raises RuntimeError if none can be started."""
    settings = {name: value for name, value in config.items() if name != "code_zip"}
    settings |= {"log": log.name, "environ": {**os.environ, "RANKZERO_SCRATCH": config["scratch"]}, "notes": []}
    # Elsewhere a process that has torch loaded cannot be forked.
    if (limit := config["preload_timeout"]) and sys.platform == "linux":
        key, cold = key_of(config), _kept()[1]
        for zygote in _candidates(config, key, log):
            if zygote.launch(settings, limit):
                zygote.key, zygote.most = key, config.get("zygotes", 1)
                return zygote
            zygote.close()
        if key not in cold:
            cold.append(key)
            why = _printed(log) or f": that took more than {limit:g} s"
            settings["notes"] = [f"rankzero: torch could not be loaded ahead, so each rank here imports it{why}"]
    zygote = start_zygote(config, log, is_warm=False)
    if not zygote.launch(settings, START_TIMEOUT):
        zygote.close()
        raise RuntimeError(f"rankzero agent of task {config['task']} did not start{_printed(log)}")
    return zygote


def key_of(config: dict[str, Any]) -> str:
    """Returns a digest of all that the state of a zygote depends on: launches with one key can share it."""
    env = {name: value for name, value in {**os.environ, **config["env"]}.items() if not PER_RUN.fullmatch(name)}
    with open("/proc/self/status") as file:
        inherited = [line for line in file if line.startswith(("Umask:", "Cpus_allowed:"))]
    code = config["code_path"] or hashlib.sha256(config["code_zip"]).hexdigest()
    path = [place for place in env.pop("PYTHONPATH", "").split(os.pathsep) if not _SPARKS.search(place)] or [""]
    parts = [sys.executable, code, os.readlink("/proc/self/cwd"), inherited, path, env]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _candidates(config: dict[str, Any], key: str, log: IO[bytes]) -> Iterator[Zygote]:
    """Yields an idle zygote, one of a shared process, and a new one, unless torch could not be loaded before."""
    idle, cold = _kept()
    for zygote in [zygote for zygote in idle if zygote.key == key]:
        with contextlib.suppress(ValueError):  # Another thread may have taken it
            idle.remove(zygote)
            yield zygote
    if key in cold:
        return
    if address := os.environ.get(SHARED) or ("shared" in config and os.path.join(config["shared"], key)):
        channel = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # Such a process may have ended
            channel.connect(address)
        yield Zygote(channel, config["code_path"] or "")
    yield start_zygote(config, log, is_warm=True)


def start_zygote(config: dict[str, Any], log: IO[bytes] | None, *, is_warm: bool, name: str = "") -> Zygote:
    """Starts a zygote, which can be sent a configuration immediately; ``log``, else its own, gets what it prints."""
    directory = Directory("agent")
    code = config["code_path"] or directory.put("rankzero.zip", config["code_zip"])
    # A check for GPUs that a library makes while it is imported must not open one.
    env = {**os.environ, **config["env"], "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, "-c", BOOTSTRAP.format("task.zygote", "main"), code, str(os.getpid())]
    command += ["warm" if is_warm else "cold", directory.path]
    ours, theirs = socket.socketpair()
    if name:
        # It forks a zygote for each process that connects to the socket of this name in its directory.
        theirs = socket.socket(socket.AF_UNIX)
        theirs.bind(os.path.join(directory.path, name))
        theirs.listen()
    with theirs:
        stdio: dict[str, Any] = {"stdin": theirs, "stdout": log or directory.log, "stderr": subprocess.STDOUT}
        stdio["pass_fds"] = [directory.log.fileno()]
        process = subprocess.Popen(command, env=env, start_new_session=True, **stdio)
    return Zygote(ours, code, process, directory)


def _kept() -> tuple[list[Zygote], list[object]]:
    """Returns this process's idle zygotes, and the keys for which torch could not be loaded ahead."""
    # A forked child must not use those of its parent.
    idle, cold = vars(sys).setdefault(_KEPT, {}).setdefault(os.getpid(), ([], []))
    return idle, cold


def _printed(log: IO[bytes]) -> str:
    """Returns the last 4 KiB of a log, for an error's message."""
    text = os.pread(log.fileno(), 4096, max(0, os.fstat(log.fileno()).st_size - 4096)).decode(errors="replace")
    return f": {text.strip()}" if text.strip() else ""
