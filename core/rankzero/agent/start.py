"""Two ways to start an agent: a fork of a warm server that has torch loaded, or a fresh interpreter.

Runs in Spark's Python worker or in the driver, where nothing of rankzero may be imported: this module is pickled by
value, and uses the standard library only.
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

LOCK_TIMEOUT = 3.0
"""Seconds to wait for another task that starts the warm server."""

ANSWER_TIMEOUT = 120.0
"""Seconds for a warm server, which may be loading torch, to answer a request."""

ORPHAN_TIMEOUT = 3.0
"""Seconds for an agent to die with its warm server."""

SOCKET_PATH_LIMIT = 100
"""Characters that the path of a Unix socket may have."""

_LOCK_INTERVAL = 0.005
_READ = 1 << 12

# What torch and the libraries below it read while they are loaded; every other variable is set after a fork.
_LOAD_TIME = re.compile(
    r"(LD_|MALLOC_|GLIBC_|PYTHON(?!_WORKER_)|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NUMEXPR_|NPY_|NUMPY_|TORCH|"
    r"PYTORCH|ATEN_|TRITON_|CUDA(?!_VISIBLE_DEVICES$)|CUBLAS|CUDNN|NVIDIA_|HIP|HSA_|ROC|MIOPEN_|DNNL_|ONEDNN_|IPEX_|XLA_|"
    r"LC_|SSL_|OPENSSL_|XDG_|CONDA_).*|PATH|HOME|LANG|LANGUAGE|TZ|USER|LOGNAME|VIRTUAL_ENV"
)

_BOOTSTRAP = "import sys; sys.path[:1] = [sys.argv.pop(1)]; import rankzero, cloudpickle; "
_BOOTSTRAP += "sys.path.append(sys.path.pop(0)); from rankzero.agent.{} import main; main()"


class WarmAgent:
    """An agent that a warm server forked: used like a `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, stdin: IO[bytes], pid: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._connection = connection
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, minus the signal's number if one ended it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(_hear(self._connection)["status"])
            except TimeoutError:
                raise subprocess.TimeoutExpired("agent", timeout or 0.0) from None
            except OSError:
                # The server was killed, and the kernel kills the agent for it.
                if self._pidfd is not None:
                    select.select([self._pidfd], [], [], ORPHAN_TIMEOUT)
                self.returncode = -signal.SIGKILL
            self._connection.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        return self.returncode

    def kill(self) -> None:
        """Sends SIGKILL, if it lives."""
        with contextlib.suppress(OSError, TypeError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # type: ignore[arg-type]


def start_fresh(code: str, log: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """An agent as a new interpreter, which starts its workers as new interpreters."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOTSTRAP.format("supervise"), code],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=env,
    )


def start_warm(config: dict[str, Any], log: int, env: dict[str, str]) -> WarmAgent | None:
    """An agent forked by this executor's warm server, which is started if there is none.

    Returns:
        None where that is not possible: the caller starts a fresh one.
    """
    if not (config["warm_start"] and hasattr(os, "pidfd_open") and sys.platform == "linux"):
        return None
    try:
        owner = config.get("owner") or _executor()
        loaded = {name: value for name, value in {**env, **config["env"]}.items() if _LOAD_TIME.fullmatch(name)}
        directory = _directory(_key(config, owner, loaded))
        request = {"env": env, "directory": os.getcwd(), "title": f"task {config['task']}"}
        for _ in range(2):
            # A server that has just ended by itself hangs up: the second try starts another.
            with contextlib.suppress(OSError):
                return _ask(_connect(directory) or _serve(directory, config, owner, loaded), request, log)
    except (OSError, ValueError):
        # No place for its socket, or no Linux as we know it.
        pass
    return None


def _ask(connection: socket.socket, request: dict[str, Any], log: int) -> WarmAgent:
    read, write = os.pipe()
    stdin = open(write, "wb")
    try:
        connection.settimeout(ANSWER_TIMEOUT)
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [data], [read, log])
        connection.sendall(data[sent:])
        return WarmAgent(connection, stdin, _hear(connection)["pid"])
    except BaseException:
        stdin.close()
        connection.close()
        raise
    finally:
        os.close(read)


def tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket) -> dict[str, Any]:
    """Receives one line of JSON, byte by byte: what follows belongs to the next call."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the warm server is gone")
        line += byte
    message: dict[str, Any] = json.loads(line)
    return message


def _executor() -> int:
    """The process with which everything on this executor ends: its JVM."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return os.getppid()


def start_time(pid: int) -> str:
    """When a process was started, in the kernel's words: with its id that names it for good."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def _key(config: dict[str, Any], owner: int, loaded: dict[str, str]) -> str:
    """Names everything on which the state of a warm server depends."""
    places = []
    for place in sys.path:
        # Installing or removing a package changes the directory it is in.
        if os.path.basename(place) in ("site-packages", "dist-packages"):
            with contextlib.suppress(OSError):
                places.append([place, os.stat(place).st_mtime_ns])
    torch = importlib.util.find_spec("torch")
    code = config["code_path"] or hashlib.sha256(config["code_zip"]).hexdigest()
    facts = [sys.executable, sys.version, owner, start_time(owner), code, torch and torch.origin, places, loaded]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _directory(key: str) -> str:
    """The server's directory below one that is this user's alone. Raises OSError if that cannot be had."""
    for temporary in (tempfile.gettempdir(), "/tmp"):
        base = os.path.join(temporary, f"rankzero-warm-{os.geteuid()}")
        if len(os.path.join(base, key, "socket")) <= SOCKET_PATH_LIMIT:
            break
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
    found = os.lstat(base)
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise PermissionError(f"{base} is not a directory of this user alone")
    return os.path.join(base, key)


def _connect(directory: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(LOCK_TIMEOUT)
        connection.connect(os.path.join(directory, "socket"))
    except OSError:
        connection.close()
        return None
    return connection


def _serve(directory: str, config: dict[str, Any], owner: int, loaded: dict[str, str]) -> socket.socket:
    """Starts the server, unless another task was faster, and connects. Raises OSError."""
    os.makedirs(directory, 0o700, exist_ok=True)
    lock = os.open(os.path.join(directory, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise TimeoutError("the warm server is being started, and does not come")
            time.sleep(_LOCK_INTERVAL)
        if connection := _connect(directory):
            return connection
        _remove_dead(os.path.dirname(directory), directory)
        _start_server(directory, config, owner, loaded)
    finally:
        os.close(lock)
    if connection := _connect(directory):
        return connection
    raise ConnectionError("the warm server ended at once")


def _start_server(directory: str, config: dict[str, Any], owner: int, loaded: dict[str, str]) -> None:
    code = config["code_path"]
    if code is None:
        code = os.path.join(directory, "rankzero.zip")
        with open(code, "wb") as file:
            file.write(config["code_zip"])
    path = os.path.join(directory, "socket")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    # Its forks show their environment in the place that its own takes.
    room = sum(len(name) + len(value) + 2 for name, value in {**os.environ, **config["env"]}.items())
    env = {**loaded, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "RANKZERO_ROOM": "." * min(room + 8192, 100_000)}
    with socket.socket(socket.AF_UNIX) as listener, open(os.path.join(directory, "log"), "wb") as log:
        listener.bind(path)
        listener.listen(128)
        arguments = [directory, str(listener.fileno()), str(owner), start_time(owner)]
        server = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP.format("warm"), code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            env=env,
        )
    # Collects its exit status, should it end before this process does.
    threading.Thread(target=server.wait, name="rankzero-warm", daemon=True).start()


def _remove_dead(base: str, mine: str) -> None:
    """Removes what servers left that were killed."""
    for path in glob.glob(os.path.join(glob.escape(base), "*", "socket")):
        directory = os.path.dirname(path)
        if directory != mine:
            if connection := _connect(directory):
                connection.close()
            else:
                shutil.rmtree(directory, ignore_errors=True)
