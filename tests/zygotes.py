"""Forks zygotes for all processes of the suite, which would otherwise import torch some thousand times.

`python zygotes.py` is the broker: for each connection it reads which variables matter to what torch imports, and passes
the connection on to a process that has torch loaded with those. That one forks a zygote, which belongs to the process
that has connected, as its own zygote would.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys

import rankzero

MOST = 8  # Processes with torch loaded that wait for connections

BOOTSTRAP = (
    "import sys; sys.path[:1] = [sys.argv[1]]; import rankzero, cloudpickle; sys.path.append(sys.path.pop(0)); "
    "exec(compile(open(sys.argv[2]).read(), sys.argv[2], 'exec'), {'__name__': 'template'}); "
)

LOADED = re.compile(
    "(LD_|MALLOC_|PYTHON(?!_WORKER_)|OMP_|MKL_|KMP_AFFINITY|OPENBLAS_|TORCH(?!_HOME|INDUCTOR_CACHE|ELASTIC|_NCCL)|PYTORCH_|"
    "LC_).*|PATH|HOME|LANG|TZ|RANKZERO_PRELOAD"
)
"""Variables that are read while torch is imported."""


def broker() -> None:
    """Serves the listening socket that is standard input, until the process that started it has exited."""
    listener, above = socket.socket(fileno=0), os.pidfd_open(os.getppid())
    templates: dict[str, socket.socket] = {}
    poll = select.poll()
    for descriptor in (listener.fileno(), above):
        poll.register(descriptor, select.POLLIN)
    while above not in {ready for ready, _ in poll.poll()}:
        # A process that is killed while it connects, or a template that was killed, ends no broker.
        with contextlib.suppress(OSError, ValueError), listener.accept()[0] as connection:
            serve(connection, templates)
        while len(templates) > MOST:
            templates.pop(next(iter(templates))).close()


def serve(connection: socket.socket, templates: dict[str, socket.socket]) -> None:
    """Passes a connection on to the template of its environment, which is then the last of the templates."""
    connection.settimeout(10.0)
    while not (line := connection.recv(1 << 20, socket.MSG_PEEK)).endswith(b"\n") and line:
        pass
    if line and can_share(connection):
        config = json.loads(line)
        env = {**config["environ"], **config["env"]}
        env = {name: value for name, value in env.items() if LOADED.fullmatch(name)}
        key = json.dumps(env, sort_keys=True)
        template = templates.pop(key, None) or start_template(env)
        socket.send_fds(template, [b"."], [connection.fileno()])
        # Not reached if the template was killed, so that the next connection starts another one.
        templates[key] = template


def can_share(connection: socket.socket) -> bool:
    """False for a process with another Python, or on what counts as another host: it starts zygotes of its own."""
    pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        spaces = [[os.readlink(f"/proc/{one}/ns/{name}") for name in ("net", "mnt", "pid")] for one in (pid, "self")]
        with open(f"/proc/{pid}/cmdline") as file:
            folder, name = os.path.split(os.path.join(f"/proc/{pid}/cwd", file.read().partition("\0")[0]))
        # A process of xdist shows a title instead.
        is_python = re.fullmatch(r"python[\d.]*", name)
        is_same = not is_python or os.path.samefile(folder, os.path.dirname(sys.executable))
    except OSError:
        return False
    return is_same and spaces[0] == spaces[1]


def start_template(env: dict[str, str]) -> socket.socket:
    """Starts a process that imports torch with this environment, and forks a zygote for each connection it is sent."""
    ours, theirs = socket.socketpair()
    # The kernel shows the environment of its forks in the memory that its own environment takes.
    env = {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "ROOM": "." * 30_000}
    # The search path of the forks is that of a zygote.
    command = [sys.executable, "-c", BOOTSTRAP, os.path.dirname(os.path.dirname(rankzero.__file__)), __file__]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs, env=env, start_new_session=True)
    # The suite counts these files at its end.
    with open(os.path.join(os.path.dirname(os.environ["RANKZERO_ZYGOTE"]), str(process.pid)), "w"):
        pass
    return ours


def template() -> None:
    """Imports all that a zygote imports ahead or later, and forks zygotes until standard input ends."""
    import signal

    from rankzero.host import forks, processes
    from rankzero.task import zygote

    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    processes.become_subreaper()
    zygote.load([*zygote.PRELOADED, *os.environ.get(zygote.PRELOAD, "").split(",")])
    zygote.load_rest()
    zygote.gather_memory()
    del os.environ["ROOM"]
    set_environment = forks.set_environment
    for name, value in os.environ.items():
        # The C library then keeps it elsewhere.
        os.environ[name] = value

    def show(env: dict[str, str]) -> None:
        set_environment(env)
        with open("/proc/self/stat") as file:
            start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
        text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)

    forks.set_environment = show  # type: ignore[assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while descriptors := socket.recv_fds(channel, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            owner, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.chdir(f"/proc/{owner}/cwd")
            zygote.fork(connection, prepares=False)
    os._exit(0)


if __name__ == "template":
    template()
elif __name__ == "__main__":
    broker()
