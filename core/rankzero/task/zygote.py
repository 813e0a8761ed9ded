"""The zygote: a process that has imported torch once, and forks an agent for each configuration that it reads.

It belongs to the process that holds the agents (`rankzero.task.zygotes`), and runs no user code::

    -> {"environ": {...}, ...}         one line with the configuration of an agent
    <- {"pid": 4711}
    <- {"status": 0}                   the agent's last act; any other status is sent by the zygote, after its end
    end of file, or the owner's exit: the agent gets its grace, and the zygote ends

An agent is forked before its configuration arrives, for which it waits. A pair of sockets connects it to the zygote.
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
    watched, lines, is_clean = [channel.fileno(), *_pidfds(owner)], channel.makefile("rb"), True
    while is_clean and not forks.touches_gpu():
        agent, ours = _fork_agent(watched, notes)
        if prepares and not processes.readable(watched, LATER_AFTER_IDLE):
            load_rest()
            gather_memory()
            # Another one, which has it all.
            ours.close()
            os.waitpid(agent, 0)
            agent, ours = _fork_agent(watched, notes)
            prepares = False
        line = b""
        if processes.readable(watched, IDLE_TIMEOUT()) == watched[:1]:
            # The owner may have exited.
            with contextlib.suppress(ConnectionResetError):
                line = lines.readline()
        if not line.endswith(b"\n"):
            return
        with ours:
            is_clean = _follow_agent(agent, ours, line, channel, watched, prepares=prepares)
        notes = ()


def _fork_agent(watched: Sequence[int], notes: Sequence[str]) -> tuple[int, socket.socket]:
    """Forks an agent, which waits for its configuration; returns its process id and the zygote's socket to it."""
    ours, theirs = socket.socketpair()

    def run_agent() -> None:
        _outlive_signals()
        with theirs.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            return
        config = json.loads(line)
        config["notes"] += notes
        config["watched"] = [theirs.fileno(), *watched[1:]]
        log = os.open(config["log"], os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        forks.set_environment(config.pop("environ"))
        supervise.run(config)
        # Nothing that it has started is left, and to release its own memory takes 10 ms.
        with contextlib.suppress(OSError):
            os.write(0, b'{"status": 0}\n')

    with theirs:
        keep = [theirs.fileno(), *watched[1:]]
        stdio = watched[0], 1, 2
        agent = forks.fork(run_agent, env=os.environ, stdio=stdio, keep=keep, on_parent_death=signal.SIGCONT)
    return agent, ours


def _outlive_signals() -> None:
    """Ignores signals that a whole tree of processes gets, of which an agent gives its ranks their grace."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _follow_agent(
    agent: int, ours: socket.socket, line: bytes, channel: socket.socket, watched: Sequence[int], *, prepares: bool
) -> bool:
    """Runs an agent and ends what it leaves; returns False if this process must end, too."""
    # The owner may have exited, or something has killed the agent.
    with contextlib.suppress(OSError):
        ours.sendall(line)
        channel.sendall(b'{"pid": %d}\n' % agent)
    ended, config = ours.fileno(), json.loads(line)
    if prepares and not processes.readable([ended, *watched], LATER_AFTER_START):
        load_rest()
    if ended not in processes.readable([ended, *watched], None):
        # The agent may be stopped. It watches the owner, too, and gives its ranks their grace.
        os.kill(agent, signal.SIGCONT)
        if not processes.readable([ended], config["grace"] + config["exit_timeout"] + OWNERLESS_MARGIN()):
            os.kill(agent, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    is_clean = processes.kill_descendants()
    if status:
        with contextlib.suppress(OSError):
            channel.sendall(b'{"status": %d}\n' % status)
    return is_clean and not status


def _pidfds(owner: int) -> list[int]:
    """Returns a pidfd of the owner, of whose socket a child that it has forked may have a copy; empty without them."""
    with contextlib.suppress(OSError, AttributeError):
        return [os.pidfd_open(owner)]
    return []


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
    watched = [listener.fileno(), *_pidfds(owner)]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while processes.readable(watched, None) == watched[:1]:
        with listener.accept()[0] as connection:
            fork_zygote(connection, prepares=True)


def fork_zygote(channel: socket.socket, *, prepares: bool) -> None:
    """Forks a zygote that belongs to the process at the other end of the channel."""
    owner = peer_of(channel)

    def main() -> None:
        processes.become_subreaper()
        run(channel, owner, prepares=prepares)

    with open(os.devnull) as nothing:
        stdio = nothing.fileno(), 1, 2
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
    _outlive_signals()
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
    processes.end_with_parent(owner, signal.SIGCONT)
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
