"""The warm server: a process with torch loaded that forks agents, which fork their workers.

One for each executor (or local driver process) and each environment that matters when torch is loaded. It never
runs user code, touches no GPU, and what a run does in its forks cannot come back here: so nothing leaks from one
run into the next. It ends with its executor, or after `IDLE_TIMEOUT` without a run.

    -> {"env": {...}, "directory": "..."}    with two descriptors: the agent's standard input, its log
    <- {"pid": 4711}
    <- {"status": 0}                          of waitpid, when the agent has ended
    end of file: whoever holds the agent is gone
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from typing import Any

from rankzero.agent import descendants, forked, start, supervise

IDLE_TIMEOUT = 300.0
"""Seconds without an agent after which the server ends."""

PRELOAD_AFTER = 0.5
"""Seconds without a request after which it loads what the first step of an optimizer would."""

REQUEST_TIMEOUT = 5.0
"""Seconds for a client to send its request once it has connected."""

PRELOADED = ("torch.distributed", "rankzero.agent.worker", "rankzero.train", "rankzero.formats", "rankzero.result")
PRELOADED_LATER = ("torch._dynamo", "tabulate")
"""With it comes an exit handler that imports the other."""

_READ = 1 << 16
_CREDENTIALS = struct.Struct("3i")


class WarmServer:
    """Forks an agent for each connection."""

    def __init__(self, directory: str, listener: socket.socket, owner: int) -> None:
        """Prepares the server.

        Args:
            directory: The server's own, which it removes at its end.
            listener: A listening Unix socket in it.
            owner: Descriptor of the process (a pidfd) with which the server ends.
        """
        self._directory = directory
        self._listener = listener
        self._agents: dict[int, socket.socket] = {}
        self._idle_since = time.monotonic()
        self._loaded = False
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, self._on_owner_gone)
        self._owner = owner
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        self._woken, self._wake = woken, wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, self._on_child)

    def run(self) -> None:
        """Serves until the owner is gone, or nobody came for `IDLE_TIMEOUT`; never leaves before its agents."""
        while not (self._ending and not self._agents):
            events = self._selector.select(self._time_left())
            for key, _ in events:
                key.data()
            if not events:
                self._use_the_pause()

    def _time_left(self) -> float | None:
        if not self._loaded and not self._ending:
            return PRELOAD_AFTER
        if self._agents:
            return None
        return max(0.0, self._idle_since + IDLE_TIMEOUT - time.monotonic())

    def _use_the_pause(self) -> None:
        if not self._loaded:
            self._loaded = True
            load(PRELOADED_LATER)
            if touches_gpu():
                self._end()
        elif not self._agents and time.monotonic() - self._idle_since >= IDLE_TIMEOUT:
            self._end()

    def _on_owner_gone(self) -> None:
        self._selector.unregister(self._owner)
        self._end()

    def _end(self) -> None:
        """From here on nobody finds this server; who had connected already is told by the end of the connection."""
        if not self._ending:
            self._ending = True
            self._selector.unregister(self._listener)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            pid = self._serve(connection)
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"a request failed: {error}\n")
            connection.close()
            return
        self._agents[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_holder(pid, connection))

    def _serve(self, connection: socket.socket) -> int:
        connection.settimeout(REQUEST_TIMEOUT)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if (user := _CREDENTIALS.unpack(credentials)[1]) != os.geteuid():
            raise PermissionError(f"user {user} has no business here")
        data, descriptors, _, _ = socket.recv_fds(connection, _READ, 2)
        try:
            while not data.endswith(b"\n"):
                more = connection.recv(_READ)
                if not more:
                    raise ConnectionError("it ended in the middle")
                data += more
            request: dict[str, Any] = json.loads(data)
            standard_input, log = descriptors
            pid = forked.fork(
                supervise.main,
                title=f"rankzero.agent.supervise {request['title']}",
                env=request["env"],
                stdio=(standard_input, log, log),
                directory=request["directory"],
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        # Nobody holds it if this fails: it reads the end of its standard input, and is reaped like the others.
        with contextlib.suppress(OSError):
            start.tell(connection, {"pid": pid})
        return pid

    def _on_holder(self, pid: int, connection: socket.socket) -> None:
        """A client never says anything again: this is its end. A stopped agent would not read it."""
        self._selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _on_child(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_READ)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if connection := self._agents.pop(pid, None):
                self._idle_since = time.monotonic()
                # What a killed agent left comes to this process; its holder hears of the end when that has gone too.
                descendants.kill_all(but=set(self._agents))
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    start.tell(connection, {"status": status})
                connection.close()


def load(names: tuple[str, ...]) -> None:
    """Imports modules, and takes everything that is there out of the collector's sight: forks share it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def touches_gpu() -> bool:
    """True if something here has opened a GPU: its forks could not use it any more."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return True
    return False


def main() -> None:
    """Entry point of the server: its directory, the listener's descriptor, process id and start time of its owner."""
    directory, listener, owner, started = sys.argv[1:]
    descendants.become_subreaper()
    watched = os.pidfd_open(int(owner))
    if start.start_time(int(owner)) != started:
        raise SystemExit("whoever started this server is gone")
    load(("torch", *PRELOADED))
    os.environ.pop(forked.ROOM, None)
    if "torch" in sys.modules and not touches_gpu():
        WarmServer(directory, socket.socket(fileno=int(listener)), watched).run()
    shutil.rmtree(directory, ignore_errors=True)
