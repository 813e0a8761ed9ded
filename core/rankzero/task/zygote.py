"""The zygote: a process that has imported torch once, and forks an agent for each configuration that it reads.

It belongs to the process that holds the agents (`rankzero.task.zygotes`), and runs no user code::

    -> {"environ": {...}, ...}         one line with the configuration of an agent
    <- {"pid": 4711}
    <- {"status": 0}                   the agent's last act; any other status is sent by the zygote, after its end
    end of file, or the owner's exit: the agent gets its grace, and the zygote ends

Zygote and agent are both subreapers. The zygote ends what a killed agent leaves; the agent watches the zygote, and ends
its ranks if that is killed. So nothing of a run survives either of them. Both watch the owner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from rankzero import bounds
from rankzero.agent import supervise
from rankzero.host import forks, processes
from rankzero.task.scratch import lock_directory

IDLE_TIMEOUT = bounds.scaled(300.0)  # Without an agent after which a zygote exits
LATER_AFTER_IDLE = 0.5  # Seconds without work after which a zygote imports the rest
LATER_AFTER_START = 5.0  # Seconds after a launch until it does so although the agent runs
OWNERLESS_MARGIN = bounds.stretched(15.0)  # Beyond the grace of an agent whose owner has exited

PRELOADED = (
    *("torch", "torch.distributed", "encodings.idna", "rankzero.worker.main", "rankzero.compat", "rankzero.train"),
    *("rankzero.train.parts", "rankzero.train.writer", "rankzero.store.remote", "rankzero.values.formats"),
    "rankzero.values.ref",
)
PRELOADED_LATER = ("torch._dynamo", "rankzero.launcher", "rankzero.engines.local", "rankzero.engines.spark.engine")
"""The first optimizer imports the first one. The others are imported by most modules that hold a training function."""

PRELOAD = "RANKZERO_PRELOAD"
"""Environment variable with the names of further installed modules, separated by commas, that a zygote imports."""

_MADV_COLLAPSE = 25  # linux/mman.h; since Linux 6.1


def run(channel: socket.socket, owner: int, notes: Sequence[str] = (), *, prepares: bool = False) -> None:
    """Forks one agent after the other, until the owner has exited or lets go of the socket.

    Args:
        channel: The socket to the process that holds the agents.
        owner: The id of that process.
        notes: Lines for the log of the first run.
        prepares: True uses pauses for what makes later launches cheaper.
    """
    watched, lines = os.pidfd_open(owner), channel.makefile("rb")
    while _wait([channel.fileno(), watched], prepares) == [channel.fileno()] and not forks.touches_gpu():
        line = b""
        # The owner may have exited.
        with contextlib.suppress(ConnectionResetError):
            line = lines.readline()
        if not line.endswith(b"\n") or _is_let_go(channel):
            return
        config = json.loads(line)
        config["notes"] += notes
        notes = ()
        if not _run_agent(config, channel, watched):
            return


def _is_let_go(channel: socket.socket) -> bool:
    """Returns True if the owner has let go, which does not wait for long imports: it has another agent by now."""
    with contextlib.suppress(BlockingIOError):
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _run_agent(config: dict[str, Any], channel: socket.socket, owner: int) -> bool:
    """Runs an agent and ends what it leaves; returns False if this process must end, too."""
    config |= {"zygote": os.getpid(), "owner": owner}
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND)

    def run_agent() -> None:
        supervise.run(config)
        # Nothing that it has started is left, and to release its own memory takes 10 ms.
        with contextlib.suppress(OSError):
            os.write(0, b'{"status": 0}\n')

    agent = forks.fork(
        run_agent,
        env=config.pop("environ"),
        stdio=(channel.fileno(), log, log),
        keep=[owner],
        on_parent_death=signal.SIGCONT,
    )
    os.close(log)
    ended = os.pidfd_open(agent)
    _send(channel, {"pid": agent})
    if "torch" in sys.modules and not processes.readable([ended, owner], LATER_AFTER_START):
        load_rest()
    if ended not in processes.readable([ended, owner], None):
        # The agent may be stopped. It watches the owner, too, and gives its ranks their grace.
        os.kill(agent, signal.SIGCONT)
        if not processes.readable([ended], config["grace"] + config["exit_timeout"] + OWNERLESS_MARGIN()):
            os.kill(agent, signal.SIGKILL)
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    is_clean = processes.kill_descendants()
    if status:
        _send(channel, {"status": status})
    return is_clean and not status


def _send(channel: socket.socket, message: dict[str, int]) -> None:
    # The owner may have exited.
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def _wait(descriptors: Sequence[int], prepares: bool) -> list[int]:
    """Waits for input, at most `IDLE_TIMEOUT`."""
    if prepares and not processes.readable(descriptors, LATER_AFTER_IDLE):
        load_rest()
        gather_memory()
    return processes.readable(descriptors, IDLE_TIMEOUT())


def load(names: Sequence[str]) -> list[str]:
    """Imports modules that the forks share; returns a line for each that cannot be imported."""
    notes = []
    # Garbage collection during the imports took a tenth of the time.
    gc.disable()
    for name in filter(None, map(str.strip, names)):
        try:
            importlib.import_module(name)
        except BaseException as error:
            # Modules may exit, or raise as a test that is skipped does.
            notes.append(f"rankzero: {name} could not be loaded ahead ({error!r}): ranks import it themselves")
    forks.prepare()
    gc.enable()
    return notes


@functools.cache
def load_rest() -> None:
    """Imports the modules of `PRELOADED_LATER`."""
    load(PRELOADED_LATER)
    with contextlib.suppress(KeyError, AttributeError):
        dynamo: Any = sys.modules["torch._dynamo.utils"]
        # Formats a table, for 0.1 s in each rank, before it checks whether the log level shows it.
        atexit.unregister(dynamo.dump_compile_times)
        atexit.register(lambda: dynamo.log.isEnabledFor(logging.INFO) and dynamo.dump_compile_times())


@functools.cache
def gather_memory() -> None:
    """Gathers the memory of this process in huge pages: a fork copies their page tables in a fifth of the time."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, access, _, _, inode, *name in mappings:
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def serve(listener: socket.socket, owner: int) -> None:
    """Forks a zygote for each process that connects, until the owner has exited."""
    watched = os.pidfd_open(owner)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while watched not in (ready := _wait([listener.fileno(), watched], True)):
        if ready:
            with listener.accept()[0] as connection:
                fork_zygote(connection)


def fork_zygote(channel: socket.socket) -> None:
    """Forks a zygote that belongs to the process at the other end of the channel."""
    owner = peer_of(channel)

    def main() -> None:
        processes.become_subreaper()
        # The owner may have exited meanwhile.
        with contextlib.suppress(ProcessLookupError):
            run(channel, owner)

    with open(os.devnull) as nothing:
        stdio = (nothing.fileno(), 1, 2)
        forks.fork(main, env=os.environ, stdio=stdio, keep=[channel.fileno()], on_parent_death=signal.SIGCONT)


def peer_of(channel: socket.socket) -> int:
    """Returns the id of the process at the other end of a Unix socket."""
    return int(struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def main() -> None:
    """Entry point of the zygote. Its standard input is the socket to its owner, or the one that it listens on.

    Its arguments: the owner's process id; the zygote's own directory, which goes with it; ``warm`` to import torch.
    """
    owner, directory, kind = int(sys.argv[1]), *sys.argv[2:]
    processes.settle_signals()
    # Of a whole tree of processes that gets one of these, the agent needs this process to give its ranks their grace.
    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # An import may hang.
    processes.end_with_parent(owner)
    processes.become_subreaper()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if directory:
        lock_directory(directory)
    notes: list[str] = []
    if kind == "warm":
        importlib.import_module("torch")
        notes = load([*PRELOADED, *os.environ.get(PRELOAD, "").split(",")])
        if forks.touches_gpu():
            raise SystemExit("a module that was loaded ahead has opened a GPU")
    # Wakes a stopped zygote.
    processes.signal_on_parent_death(signal.SIGCONT)
    try:
        if channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            serve(channel, owner)
        else:
            run(channel, owner, notes, prepares=kind == "warm")
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Skips exit handlers: `forks.prepare` has switched off what the libraries would undo.
        os._exit(0)
