"""The zygote: a process that has imported torch once, and forks an agent for each configuration that it reads.

It belongs to the process that holds the agents (`rankzero.task.zygotes`), and runs no user code::

    -> {"environ": {...}, ...}         one line with the configuration of an agent
    <- {"pid": 4711}
    -> 4711                            kills the agent of this id, unless it has ended
    <- {"status": 0}                   the agent and all its descendants have ended
    end of file, or the owner's exit: the agent gets its grace, and the zygote ends

Zygote and agent are both subreapers. The zygote ends what a killed agent leaves; the agent watches the zygote, and ends
its ranks if that is killed. So nothing of a run survives either of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from rankzero import bounds
from rankzero.agent import supervise
from rankzero.host import forked, processes
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

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # linux/mman.h; since Linux 6.1


class Zygote:
    """The state of this process: its owner, and work for the time without an agent."""

    def __init__(self, channel: socket.socket, owner: int, notes: list[str], chores: Iterator[object]) -> None:
        """Takes the socket to the process that holds the agents.

        Args:
            channel: The socket.
            owner: The id of that process.
            notes: Lines for the log of the next run.
            chores: Steps of work for the time without an agent, which make later forks cheaper.
        """
        self._channel, self._notes, self._chores = channel, notes, chores
        self._lines = channel.makefile("rb")
        self._owner = os.pidfd_open(owner)

    def run(self) -> None:
        """Forks one agent after the other, until the owner has exited or lets go of the socket."""
        is_usable = True
        while is_usable:
            ready = _await([self._channel.fileno(), self._owner], self._chores, IDLE_TIMEOUT())
            line = b"" if not ready or self._owner in ready or forked.touches_gpu() else _read(self._lines.readline)
            # Else a request to kill an agent that has ended.
            if line.startswith(b"{") or not line:
                is_usable = line.endswith(b"\n") and not self._is_let_go() and self._run_agent(json.loads(line))

    def _is_let_go(self) -> bool:
        """Returns True if the owner has let go, which does not wait for long imports: it has another agent by now."""
        with contextlib.suppress(BlockingIOError):
            return not self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    def _run_agent(self, config: dict[str, Any]) -> bool:
        """Runs an agent and ends what it leaves; returns False if this process must end, too."""
        config |= {"zygote": os.getpid(), "owner": self._owner, "notes": [*config["notes"], *self._notes]}
        self._notes = []
        read, write = os.pipe()
        log = os.open(config["log"], os.O_WRONLY | os.O_APPEND)
        agent = forked.fork(
            supervise.main,
            env=config.pop("environ"),
            stdio=(read, log, log),
            # The owner receives the end of the socket when both have exited.
            keep=(self._channel.fileno(), self._owner),
            on_parent_death=signal.SIGCONT,
        )
        for descriptor in (read, log):
            os.close(descriptor)
        self._send({"pid": agent})
        with open(write, "wb", buffering=0) as pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(config).encode() + b"\n")
            is_owned = self._follow(agent, pipe, config["grace"] + config["exit_timeout"])
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        is_clean = processes.kill_descendants()
        self._send({"status": status})
        return is_clean and is_owned

    def _follow(self, agent: int, pipe: IO[bytes], grace: float) -> bool:
        """Waits for an agent's exit; returns False if the owner has exited or let go meanwhile."""
        ended = os.pidfd_open(agent)
        watched = [ended, self._channel.fileno(), self._owner]
        act_at: float | None = time.monotonic() + LATER_AFTER_START
        while ended not in (ready := processes.readable(watched, act_at and act_at - time.monotonic())):
            if self._channel.fileno() in ready and (data := _read(self._channel.recv, 64)):
                if b"%d" % agent in data.split():
                    os.kill(agent, signal.SIGKILL)
            elif ready:
                # The end of the agent's standard input: it gives its ranks their grace. It may be stopped.
                pipe.close()
                os.kill(agent, signal.SIGCONT)
                watched, act_at = [ended], time.monotonic() + grace + OWNERLESS_MARGIN()
            else:
                act_at = None
                if pipe.closed:
                    os.kill(agent, signal.SIGKILL)
                next(self._chores, None)
        os.close(ended)
        return not pipe.closed

    def _send(self, message: dict[str, Any]) -> None:
        # The owner may have exited.
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")


def _read(read: Callable[..., bytes], *size: int) -> bytes:
    # The owner may have exited with unread messages.
    with contextlib.suppress(ConnectionResetError):
        return read(*size)
    return b""


def _await(descriptors: Sequence[int], chores: Iterator[object], timeout: float | None = None) -> list[int]:
    """Waits for input, and does chores meanwhile; the time limit begins after them."""
    ready = processes.readable(descriptors, LATER_AFTER_IDLE)
    while not ready and next(chores, None):
        ready = processes.readable(descriptors, 0.0)
    return ready or processes.readable(descriptors, timeout)


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
    forked.prepare()
    gc.enable()
    return notes


def import_rest() -> Iterator[object]:
    """Imports `PRELOADED_LATER`, in one step."""
    load(PRELOADED_LATER)
    with contextlib.suppress(KeyError, AttributeError):
        dynamo: Any = sys.modules["torch._dynamo.utils"]
        # Formats a table, for 0.1 s in each rank, before it checks whether the log level shows it.
        atexit.unregister(dynamo.dump_compile_times)
        atexit.register(lambda: dynamo.log.isEnabledFor(logging.INFO) and dynamo.dump_compile_times())
    yield True


def gather_memory() -> Iterator[object]:
    """Gathers the memory of this process in huge pages, in steps of a few milliseconds.

    A fork copies the page tables of its parent, which takes four times as long without huge pages.
    """
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, access, _, _, inode, *name in mappings:
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), _MADV_COLLAPSE)
                yield True


def serve(listener: socket.socket, owner: int) -> None:
    """Forks a zygote for each process that connects, until the owner has exited."""
    watched, chores = os.pidfd_open(owner), import_rest()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while watched not in _await([listener.fileno(), watched], chores):
        with listener.accept()[0] as connection:
            fork_zygote(connection)


def fork_zygote(channel: socket.socket) -> None:
    """Forks a zygote that belongs to the process at the other end of the channel."""

    def run() -> None:
        processes.become_subreaper()
        # The owner may have exited meanwhile.
        with contextlib.suppress(ProcessLookupError):
            Zygote(socket.socket(fileno=number), owner, [], import_rest()).run()

    number, owner = os.dup(channel.fileno()), peer_of(channel)
    with open(os.devnull) as nothing:
        stdio = (nothing.fileno(), 1, 2)
        forked.fork(run, env=os.environ, stdio=stdio, keep=[number], on_parent_death=signal.SIGCONT)
    os.close(number)


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
        if forked.touches_gpu():
            raise SystemExit("a module that was loaded ahead has opened a GPU")
    # Wakes a stopped zygote.
    processes.signal_on_parent_death(signal.SIGCONT)
    try:
        if channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            serve(channel, owner)
        else:
            chores = (step for work in (import_rest, gather_memory) for step in work())
            Zygote(channel, owner, notes, chores if kind == "warm" else iter(())).run()
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Skips exit handlers: `forked.prepare` has switched off what the libraries would undo.
        os._exit(0)
