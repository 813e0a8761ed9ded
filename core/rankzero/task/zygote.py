"""The zygote: a process that has imported torch once, and forks an agent for each configuration that it reads.

It belongs to the process that holds the agents (`rankzero.task.hold`), and runs no user code::

    -> {"environ": {...}, ...}         one line with the configuration of an agent
    <- {"pid": 4711}
    <- {"status": 0}                   the agent's last act; any other status is sent by the zygote, after its end
    end of file, or the owner's exit: the agent gets its grace, and the zygote ends

An agent is forked before its configuration arrives, for which it waits, and so are its ranks, as many as the last
launch had. A pair of sockets connects it to the zygote. Both are subreapers: the zygote ends what a killed agent
leaves; the agent watches the zygote, and ends its ranks if that is killed. Both watch the owner.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
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
from rankzero.agent.ranks import Rank
from rankzero.host import forks, processes

IDLE_TIMEOUT = bounds.scaled(300.0)  # Without an agent after which a zygote exits
LATER_AFTER_IDLE, LATER_AFTER_START = 0.5, bounds.scaled(5.0)  # Seconds idle, or of an agent, until the rest is loaded
MOST_AHEAD, AHEAD_AFTER = 8, 0.15  # Ranks that are forked ahead; seconds in which the next launch is undisturbed
OWNERLESS_MARGIN = bounds.stretched(15.0)  # Beyond the grace of an agent whose owner has exited

PRELOADED = (
    *("torch", "torch.distributed", "encodings.idna", "rankzero.worker.main", "rankzero.compat", "rankzero.train"),
    *("rankzero.train.parts", "rankzero.train.writer", "rankzero.store.remote", "rankzero.values.formats"),
    "rankzero.values.ref",
)
PRELOADED_LATER = ("torch._dynamo", "rankzero.launcher", "rankzero.engines.local", "rankzero.engines.spark.engine")
"""The first optimizer imports the first one. The others are imported by most modules that hold a training function."""

PRELOAD = "RANKZERO_PRELOAD"  # Variable with names of further modules, separated by commas, that a zygote imports
_MADV_COLLAPSE = 25  # linux/mman.h; since Linux 6.1


class Zygote:
    """A process that forks one agent at a time, for the owner at the other end of the channel.

    The log of the first run gets the notes. With ``prepares``, pauses are used for what makes later launches cheaper.
    """

    def __init__(self, channel: socket.socket, owner: int, notes: Sequence[str] = (), *, prepares: bool) -> None:
        self._channel, self._notes, self._prepares = channel, notes, prepares
        self._ahead = 0
        self._pidfds: list[int] = []
        with contextlib.suppress(OSError, AttributeError):  # The socket may have copies; some systems have no pidfds
            self._pidfds = [os.pidfd_open(owner)]

    def run(self) -> None:
        """Forks one agent after the other, until the owner has exited or lets go of the socket."""
        processes.become_subreaper()
        _outlive_signals()
        lines, is_clean = self._channel.makefile("rb"), True
        while is_clean and not forks.touches_gpu():
            if not self._wait(LATER_AFTER_IDLE if self._prepares else AHEAD_AFTER) and self._prepares:
                load_rest()
                gather_memory()
                self._prepares = False
                continue
            ours, theirs = socket.socketpair()
            with theirs:
                run, keep = functools.partial(self._run_agent, theirs), [theirs.fileno(), *self._pidfds]
                stdio = (self._channel.fileno(), 1, 2)
                agent = forks.fork(run, env=os.environ, stdio=stdio, keep=keep, on_parent_death=signal.SIGCONT)
            if self._wait(IDLE_TIMEOUT()) != [self._channel.fileno()] or not (line := lines.readline()):
                return
            with ours:
                is_clean = self._follow_agent(agent, ours, line)

    def _wait(self, timeout: float | None, *descriptors: int) -> list[int]:
        """Waits for the owner, or for one of the descriptors; returns those that are readable."""
        return processes.readable([self._channel.fileno(), *self._pidfds, *descriptors], timeout)

    def _send(self, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # The owner may have exited
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _run_agent(self, zygote: socket.socket) -> None:
        _outlive_signals()
        processes.allow_open_files()
        ranks = [Rank(local_rank) for local_rank in range(self._ahead)]
        # Makes the loop; by a factory, since `asyncio.get_event_loop` in the ranks would return it otherwise.
        runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        runner.run(asyncio.sleep(0))
        with zygote.makefile("rb") as lines:
            if not (line := lines.readline()):
                return
        config = json.loads(line)
        config["notes"] += self._notes
        config["watched"] = [zygote.fileno(), *self._pidfds]
        # The owner has given it up, and another agent may have the directory.
        if processes.readable([0], 0):
            return
        with open(config["log"], "ab") as log, contextlib.suppress(OSError):
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            # Keeps the directory if the owner dies.
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        forks.set_environment(config.pop("environ"))
        supervise.run(config, runner, ranks)

    def _follow_agent(self, agent: int, ours: socket.socket, line: bytes) -> bool:
        """Runs an agent and ends what it leaves; returns False if this process must end, too."""
        self._notes = ()
        ours.sendall(line)  # Raises if something has killed it: the owner then starts another zygote
        self._send({"pid": agent})
        ended, config = ours.fileno(), json.loads(line)
        self._ahead = min(config["workers"], MOST_AHEAD) if "torch" in sys.modules else 0
        if self._prepares and not self._wait(LATER_AFTER_START(), ended):
            load_rest()
            self._prepares = False  # Memory that the agent shares is not gathered
        if ended not in self._wait(None, ended):
            # The agent may be stopped. It watches the owner, too, and gives its ranks their grace.
            os.kill(agent, signal.SIGCONT)
            if not processes.readable([ended], config["grace"] + config["exit_timeout"] + OWNERLESS_MARGIN()):
                os.kill(agent, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        is_clean = processes.kill_descendants()
        if status:
            self._send({"status": status})
        return is_clean and not status


def serve(listener: socket.socket, owner: int, notes: Sequence[str]) -> None:
    """Forks a zygote for each process that connects to a Unix socket, until the owner has exited."""
    watched = [listener.fileno(), os.pidfd_open(owner)]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while processes.readable(watched, None) == watched[:1]:
        with listener.accept()[0] as channel:
            fork(channel, notes, prepares=True)


def fork(channel: socket.socket, notes: Sequence[str] = (), *, prepares: bool) -> None:
    """Forks a zygote for the process at the other end of a Unix socket."""
    owner, *_ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    run = lambda: Zygote(channel, owner, notes, prepares=prepares).run()  # noqa: E731
    forks.fork(run, env=os.environ, stdio=(0, 1, 2), keep=[channel.fileno()], on_parent_death=signal.SIGCONT)


def _outlive_signals() -> None:
    """Ignores signals that a whole tree of processes gets, of which an agent gives its ranks their grace."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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


def load_rest() -> None:
    """Imports the modules of `PRELOADED_LATER`."""
    load(PRELOADED_LATER)
    with contextlib.suppress(KeyError, AttributeError):
        dynamo: Any = sys.modules["torch._dynamo.utils"]
        # Formats a table, for 0.1 s in each rank, before it checks whether the log level shows it.
        atexit.unregister(dynamo.dump_compile_times)
        atexit.register(lambda: dynamo.log.isEnabledFor(logging.INFO) and dynamo.dump_compile_times())


def gather_memory() -> None:
    """Gathers the memory of this process in huge pages: a fork copies their page tables in a fifth of the time."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        lines = file.readlines()
    for addresses, access, _, _, inode, *name in map(str.split, lines):
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def main() -> None:
    """Entry point of a zygote. Its arguments: its owner's process id, ``warm`` to import torch, and its directory."""
    owner, kind, directory = int(sys.argv[1]), *sys.argv[2:]
    processes.settle_signals()
    _outlive_signals()
    # An import may hang.
    processes.end_with_parent(owner)
    processes.become_subreaper()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if kind == "warm":
        importlib.import_module("torch")
    notes = load([*PRELOADED, *os.environ.get(PRELOAD, "").split(",")]) if kind == "warm" else []
    if forks.touches_gpu():
        raise SystemExit("a module that was loaded ahead has opened a GPU")
    processes.end_with_parent(owner, signal.SIGCONT)  # Wakes a stopped zygote
    try:
        if channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            serve(channel, owner, notes)
        else:
            Zygote(channel, owner, notes, prepares=kind == "warm").run()
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Skips exit handlers: `forks.prepare` has switched off what the libraries would undo.
        os._exit(0)
