"""Starts an agent, either as a fork of a warm server that has torch loaded or as a fresh interpreter.

Runs in Spark's Python worker or in the driver, where rankzero may not be importable: this module is pickled by value,
and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
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
import threading
import time
from typing import IO, Any

WARM_LOCK_TIMEOUT = 3.0  # Seconds to wait for another task that is starting a warm server
WARM_LOCK_INTERVAL = 0.005  # Seconds between two tries to lock
WARM_REPLY_TIMEOUT = 120.0  # Seconds for a warm server, which may still import torch, to reply
WARM_ORPHAN_TIMEOUT = 7.0  # Seconds for an agent to die with its server, and for the server to report its exit
WARM_SERVERS = 2  # Most idle warm servers of one owner; a further one ends the least recently used one
SHARED_WARM_SERVERS = 8  # The same where `OWNER` names their owner: executors of many kinds share them
SOCKET_PATH_LIMIT = 100  # Most characters in the path of a Unix socket

OWNER = "RANKZERO_WARM_OWNER"
"""Environment variable with the id of a process whose warm servers are used, instead of this executor's."""

_NEW = ".new"
_LINE = 4096  # Most bytes of an answer that one call receives

# Variables that torch and the libraries below it read while they are imported, and the names of further modules to
# load; all others are set after a fork.
# Cache directories are excluded: they are read when used, and many jobs set one for each run. So are variables that
# scikit-learn sets when it is imported, and those that torchrun gives each rank: they would name another server.
_LOAD_TIME = re.compile(
    r"(?!TORCHINDUCTOR_CACHE_DIR$|TRITON_CACHE_DIR$|TORCH_HOME$|XDG_CACHE_HOME$|TORCHELASTIC_|"
    r"TORCH_NCCL_ASYNC_ERROR_HANDLING$|KMP_DUPLICATE_LIB_OK$|KMP_INIT_AT_FORK$)"
    r"((LD_|MALLOC_|GLIBC_|PYTHON(?!_WORKER_)|OMP_|GOMP_|KMP_|MKL|OPENBLAS_|GOTO_|BLIS_|NUMEXPR_|NPY_|NUMPY_|TORCH|"
    r"PYTORCH|ATEN_|TRITON_|CUDA(?!_VISIBLE_DEVICES$)|CUBLAS|CUDNN|NVIDIA_|HIP|HSA_|ROC|MIOPEN_|DNNL_|ONEDNN_|IPEX_|XLA_|"
    r"KINETO_|GFORTRAN_|I_MPI_|ACC_|INDUCTOR_|AOT|SYMPY_|MPMATH_|CUTLASS_|CUTEDSL_|ENABLE_|FX_|PARTITIONER_|COMPILE_|"
    r"LOG_AUTOTUNE|LOG_TLPARSE|UNSAFE_SKIP_FSDP|DUMP_AOTI|FAKE_ALLOW_META|"
    r"LC_|SSL_|OPENSSL_|XDG_|CONDA_).*|PATH|HOME|LANG|LANGUAGE|TZ|USER|LOGNAME|VIRTUAL_ENV|CXX|CI|RANKZERO_PRELOAD)"
)

_BOOTSTRAP = "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; "
_BOOTSTRAP += "sys.path.append(sys.path.pop(0)); from rankzero.{} import main; main()"

_GUARD = "import sys; sys.path[:1] = [sys.argv.pop(1)]; from rankzero.host.guard import main; main()"
_HAS_GUARDS = hasattr(os, "pidfd_open") and sys.platform == "linux"


class WarmAgent:
    """An agent that a warm server forked, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, connection: socket.socket, stdin: IO[bytes], pid: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._connection = connection
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not self._await_report(timeout):
                raise subprocess.TimeoutExpired("agent", timeout or 0.0)
            try:
                self._connection.settimeout(WARM_ORPHAN_TIMEOUT)
                self.returncode = os.waitstatus_to_exitcode(_receive(self._connection)["status"])
            except (OSError, ValueError):
                # The server was killed, and the kernel kills the agent for it.
                if self._pidfd is not None:
                    _await_readable([self._pidfd], WARM_ORPHAN_TIMEOUT)
                self.returncode = -signal.SIGKILL
            self._connection.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        return self.returncode

    def _await_report(self, timeout: float | None) -> bool:
        """Waits until the server has replied, or the agent has exited without a reply; False at the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        watched = [self._connection.fileno(), *([self._pidfd] if self._pidfd is not None else [])]
        ready = _await_readable(watched, timeout)
        if not ready or self._connection.fileno() in ready:
            return bool(ready)
        left = WARM_ORPHAN_TIMEOUT if deadline is None else min(WARM_ORPHAN_TIMEOUT, deadline - time.monotonic())
        return bool(_await_readable(watched[:1], left)) or deadline is None or time.monotonic() < deadline

    def kill(self) -> None:
        """Sends SIGKILL to the agent if it is alive."""
        with contextlib.suppress(OSError, TypeError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # type: ignore[arg-type]


class FreshAgent(subprocess.Popen[bytes]):
    """An agent in a new interpreter; the process is its guard (see `rankzero.host.guard`) where pidfds exist."""

    def kill(self) -> None:
        """Makes the guard kill the agent and all its descendants."""
        if _HAS_GUARDS:
            self.send_signal(signal.SIGQUIT)
            self.send_signal(signal.SIGCONT)
        else:
            super().kill()


def start_fresh(code: str, log: int, env: dict[str, str]) -> FreshAgent:
    """Starts an agent in a new interpreter, which starts its workers in new interpreters."""
    command, env = _guarded([sys.executable, "-u", "-c", _BOOTSTRAP.format("agent.supervise"), code], code, env)
    return FreshAgent(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=env)


def _guarded(command: list[str], code: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns a command that runs the given one below a guard, and its environment; unchanged without pidfds."""
    if not _HAS_GUARDS:
        return command, env
    return [sys.executable, "-S", "-c", _GUARD, code], {**env, "RANKZERO_GUARDED": json.dumps(command)}


def start_warm(config: dict[str, Any], log: int, env: dict[str, str]) -> WarmAgent | None:
    """Has this executor's warm server fork an agent; starts the server if there is none.

    Returns:
        The agent, or None where that is not possible: the caller then starts a fresh one.
    """
    if not (config["warm_start"] and hasattr(os, "pidfd_open") and sys.platform == "linux"):
        return None
    try:
        # Fails here on kernels and in sandboxes without pidfds.
        os.close(os.pidfd_open(os.getpid()))
        owner = _owner(config)
        loaded = config.get("loaded") or load_time({**env, **config["env"]})
        path = _socket_path(_key(config, owner, loaded))
        request = {"env": env, "title": f"task {config['task']}", **_surroundings()}
        request["end_timeout"] = config["grace"] + config["exit_timeout"]
        if connection := _connect(path):
            # A server that is just exiting closes the connection.
            with contextlib.suppress(ConnectionError):
                return _request(connection, request, log)
        return _request(_serve(path, config, owner, loaded), request, log)
    except Exception:
        # Such as no directory for the socket, or a torch that fails to import: a fresh agent reports it better.
        return None


def start_ahead(config: dict[str, Any]) -> None:
    """Starts the warm server of later agents early, so that it imports torch while Spark starts their tasks.

    Args:
        config: As for `start_warm`, with the server's ``owner`` and the environment that it is ``loaded`` with: this
            process and the tasks would compute different ones.
    """
    # Agents start a server themselves if this fails, or report the reason.
    with contextlib.suppress(Exception):
        path = _socket_path(_key(config, _owner(config), config["loaded"]))
        (_connect(path) or _serve(path, config, _owner(config), config["loaded"])).close()


def load_time(env: dict[str, str]) -> dict[str, str]:
    """Returns the variables that are read while torch and the libraries below it are imported."""
    return {name: value for name, value in env.items() if _LOAD_TIME.fullmatch(name)}


def _owner(config: dict[str, Any]) -> int:
    return int(os.environ.get(OWNER) or 0) or config.get("owner") or _executor()


def _surroundings() -> dict[str, Any]:
    """Returns what a child would inherit from this process, and a fork of the warm server does not."""
    with open("/proc/self/status") as file:
        mask = next(line.split()[1] for line in file if line.startswith("Umask:"))
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "directory": os.getcwd(),
        "umask": int(mask, 8),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _request(connection: socket.socket, request: dict[str, Any], log: int) -> WarmAgent:
    read, write = os.pipe()
    stdin = open(write, "wb")
    try:
        connection.settimeout(WARM_REPLY_TIMEOUT)
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [data], [read, log])
        connection.sendall(data[sent:])
        return WarmAgent(connection, stdin, _receive(connection)["pid"])
    except BaseException:
        stdin.close()
        connection.close()
        raise
    finally:
        os.close(read)


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Receives one line of JSON, and leaves later bytes in the socket for the next call."""
    line = b""
    while not line.endswith(b"\n"):
        ahead = connection.recv(_LINE, socket.MSG_PEEK)
        if not ahead:
            raise ConnectionError("the warm server has exited")
        line += connection.recv(ahead.find(b"\n") + 1 or len(ahead))
    message: dict[str, Any] = json.loads(line)
    return message


def _executor() -> int:
    """Returns the process id of this executor's JVM, with which all its processes end."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return os.getppid()


def start_time(pid: int) -> str:
    """Returns the start time of a process in clock ticks; together with its id it is unique."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def _key(config: dict[str, Any], owner: int, loaded: dict[str, str]) -> str:
    """Returns a key of everything that the state of a warm server depends on, which begins with its owner's id."""
    places: list[list[Any]] = []
    for place in dict.fromkeys(sys.path):
        # Installing or removing a package changes the directory it is in.
        if os.path.basename(place) in ("site-packages", "dist-packages"):
            if not (sys.dont_write_bytecode or sys.pycache_prefix or os.path.isdir(f"{place}/__pycache__")):
                # The first import of a module without a package creates it, and changes the directory, too.
                with contextlib.suppress(OSError):
                    os.mkdir(f"{place}/__pycache__")
            with contextlib.suppress(OSError):
                places.append([place, os.stat(place).st_mtime_ns])
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        version = os.path.join(os.path.dirname(torch.origin), "version.py")
        with contextlib.suppress(OSError):
            places.append([version, os.stat(version).st_mtime_ns])
    if not all(map(os.path.isabs, loaded.get("PYTHONPATH", "/").split(os.pathsep))):
        places.append([os.getcwd(), 0])
    code = config["code_path"] or hashlib.sha256(config["code_zip"]).hexdigest()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    facts = [sys.executable, sys.version, namespace, owner, start_time(owner), code, places, loaded]
    return f"{owner}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


def _socket_path(key: str) -> str:
    """Returns the path of the server's socket, in a private directory. Raises OSError if none can be made."""
    for temporary in (tempfile.gettempdir(), "/tmp"):
        base = os.path.join(temporary, f"rankzero-warm-{os.geteuid()}")
        path = os.path.join(base, f"{key}.socket")
        if len(path) + len(_NEW) <= SOCKET_PATH_LIMIT:
            break
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
    found = os.lstat(base)
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise PermissionError(f"{base} is not a directory of this user alone")
    return path


def _connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(WARM_LOCK_TIMEOUT)
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _serve(path: str, config: dict[str, Any], owner: int, loaded: dict[str, str]) -> socket.socket:
    """Starts the server, unless another task was faster, and connects. Raises OSError."""
    base = os.path.dirname(path)
    # One lock file for all servers, never deleted: deleting it while it is held would let two processes lock.
    lock = os.open(os.path.join(base, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        deadline = time.monotonic() + WARM_LOCK_TIMEOUT
        while not _locks(lock):
            if time.monotonic() > deadline:
                raise TimeoutError("another warm server is being started, and that takes too long")
            time.sleep(WARM_LOCK_INTERVAL)
        if connection := _connect(path):
            return connection
        _remove_dead(base)
        _dismiss_others(base, owner)
        _start_server(path, config, owner, loaded)
    finally:
        os.close(lock)
    if connection := _connect(path):
        return connection
    raise ConnectionError("the warm server exited immediately")


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start_server(path: str, config: dict[str, Any], owner: int, loaded: dict[str, str]) -> None:
    directory = tempfile.mkdtemp(prefix="server-", dir=os.path.dirname(path))
    code = config["code_path"]
    if code is None:
        code = os.path.join(directory, "rankzero.zip")
        with open(code, "wb") as file:
            file.write(config["code_zip"])
    # The kernel shows the environment of its forks in the memory that its own environment takes.
    room = sum(len(name) + len(value) + 2 for name, value in {**os.environ, **config["env"]}.items())
    env = {**loaded, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "RANKZERO_ROOM": "." * min(room + 8192, 100_000)}
    if env.get("PYTHONPATH"):
        # The server works in another directory.
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep)))
    with (
        socket.socket(socket.AF_UNIX) as listener,
        open(os.path.join(directory, "log"), "wb") as log,
    ):
        # The server keeps this lock until it exits.
        fcntl.flock(log, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + _NEW)
        listener.bind(path + _NEW)
        listener.listen(128)
        os.rename(path + _NEW, path)
        arguments = [directory, path, str(owner), start_time(owner)]
        command, env = _guarded([sys.executable, "-c", _BOOTSTRAP.format("warm.server"), code, *arguments], code, env)
        server = subprocess.Popen(
            command,
            # As standard input: in a process without one, the socket may have its number, which Popen handles.
            stdin=listener.fileno(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=env,
        )
    # Reaps the server, should it exit before this process does.
    threading.Thread(target=server.wait, name="rankzero-warm", daemon=True).start()


def _dismiss_others(base: str, owner: int) -> None:
    """Ends this owner's least recently used servers to make room for one more; the caller has the lock."""
    limit = SHARED_WARM_SERVERS if os.environ.get(OWNER) else WARM_SERVERS
    used = {}
    for path in glob.glob(os.path.join(glob.escape(base), f"{owner}-*.socket")):
        with contextlib.suppress(FileNotFoundError):
            used[path] = os.stat(path).st_mtime_ns
    for path in sorted(used, key=used.__getitem__)[: max(0, len(used) + 1 - limit)]:
        if connection := _connect(path):
            with connection, contextlib.suppress(OSError):
                connection.sendall(b'{"dismissed": true}\n')


def _remove_dead(base: str) -> None:
    """Removes the files of servers that were killed; the caller has the lock."""
    for path in glob.glob(os.path.join(glob.escape(base), "*.socket")):
        if connection := _connect(path):
            connection.close()
        else:
            os.unlink(path)
    for directory in glob.glob(os.path.join(glob.escape(base), "server-*")):
        with contextlib.suppress(OSError), open(os.path.join(directory, "log"), "ab") as log:
            if _locks(log.fileno()):
                shutil.rmtree(directory, ignore_errors=True)


def _await_readable(descriptors: list[int], timeout: float | None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poll.poll(None if timeout is None else max(0.0, timeout) * 1000)]
