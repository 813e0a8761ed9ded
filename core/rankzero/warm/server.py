"""The warm server: a process with torch loaded that forks agents, which fork their workers.

There is one for each executor (or local driver process) and each set of variables that torch reads when it is imported.
The server runs no user code and opens no GPU, and its forks cannot change it: so one run cannot affect the next. It
exits with its executor, after `WARM_IDLE_TIMEOUT` without a run, or when its owner has more recently used servers.

    -> {"env": {...}, "directory": "...", ...}    with two descriptors: the agent's standard input, its log
    -> {"dismissed": true}                    instead: the server forks no further agents, and exits with its last one
    <- {"pid": 4711}
    <- {"status": 0}                          of waitpid, when the agent has exited
    end of file: the task process of the agent has exited
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from rankzero import bounds
from rankzero.agent import supervise
from rankzero.host import forked, processes
from rankzero.host.guard import watch as watch_guard
from rankzero.host.processes import process_start, settle_signals
from rankzero.warm import loading

WARM_IDLE_TIMEOUT = bounds.scaled(300.0)  # Without an agent after which the server exits
WARM_CHORE_AFTER = 0.5  # Seconds without a request after which it does chores that make later ones cheaper
WARM_LOAD_AFTER = 5.0  # Seconds after a request until it loads the rest, although agents run
WARM_OWNERLESS_MARGIN = bounds.stretched(15.0)  # Beyond their grace for agents whose server has lost its owner
WARM_REQUEST_TIMEOUT = bounds.stretched(5.0)  # For a client to send its request once it has connected

_READ = 1 << 16
_CREDENTIALS = struct.Struct("3i")


class Place:
    """The directory and the socket file of a server."""

    def __init__(self, directory: str, path: str) -> None:
        """Records the inode of the socket file.

        Args:
            directory: The server's own directory, with its log.
            path: Path of its socket.
        """
        self._directory = directory
        self._path = path
        self._inode = _inode(path)

    def close(self) -> None:
        """Removes the socket file, so that no client connects, unless another server has replaced it."""
        if self._inode is not None and self._inode == _inode(self._path):
            os.unlink(self._path)
        # The next socket may get the same number.
        self._inode = None

    def note_use(self) -> None:
        """Marks the server as the most recently used one of its owner, by the time of its socket file."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        """Removes the socket file and the directory, once no fork can import from there."""
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class WarmServer:
    """Forks an agent for each connection."""

    def __init__(self, place: Place, listener: socket.socket, owner: int) -> None:
        """Registers the server's socket, its owner and its guard with the event loop.

        Args:
            place: The server's files.
            listener: The listening socket.
            owner: Pidfd of the process with which the server ends.
        """
        self._place = place
        self._listener = listener
        self._agents: dict[int, socket.socket] = {}
        self._bounds: dict[int, float] = {}
        self._kill_at: float | None = None
        self._idle_since = self._served_at = time.monotonic()
        self._chores = [self._load_later, self._gather]
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, self._on_owner_gone)
        self._owner = owner
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        self._woken, self._wake = woken, wake
        if (guard := watch_guard()) is not None:
            self._selector.register(guard, selectors.EVENT_READ, self._on_guard_gone)
            self._guard = guard
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, self._on_child)

    def run(self) -> None:
        """Serves until the owner has exited or no client connected for `WARM_IDLE_TIMEOUT`, and all agents have exited.

        When the owner has exited, agents get the grace of their runs plus `WARM_OWNERLESS_MARGIN`.
        """
        while not (self._ending and not self._agents):
            events = self._selector.select(self._time_left())
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                processes.kill_descendants()
                return
            for act in [key.data for key, _ in events] or [self._use_the_pause]:
                try:
                    act()
                except Exception:
                    # All agents die with this process: an error of one client or a chore must not end it.
                    traceback.print_exc()

    def _time_left(self) -> float | None:
        if self._kill_at is not None:
            return max(0.0, self._kill_at - time.monotonic())
        if self._agents and self._chores[:1] == [self._load_later] and not self._ending:
            return max(0.0, self._served_at + WARM_LOAD_AFTER - time.monotonic())
        if self._agents:
            # To gather memory that forks share would take it twice.
            return None
        if self._chores and not self._ending:
            return WARM_CHORE_AFTER
        return max(0.0, self._idle_since + WARM_IDLE_TIMEOUT() - time.monotonic())

    def _use_the_pause(self) -> None:
        if self._chores:
            self._chores.pop(0)()
        elif not self._agents and time.monotonic() - self._idle_since >= WARM_IDLE_TIMEOUT():
            self.end()

    def _load_later(self) -> None:
        # Agents get their grace even if the owner exits meanwhile; their exits are reported immediately.
        signal.signal(signal.SIGCHLD, lambda *_: self._collect())
        try:
            with ending_with(None if self._agents else self._owner, self._place):
                loading.load(loading.PRELOADED_LATER, os.environ.get(loading.PRELOAD, "").split(","))
                loading.settle_dynamo()
        except Exception:
            # A half imported module would be in every fork.
            self.end()
            raise
        finally:
            signal.signal(signal.SIGCHLD, lambda *_: None)
        if forked.touches_gpu():
            self.end()

    def _gather(self) -> None:
        loading.gather(lambda: not self._selector.select(0))
        if self._selector.select(0):
            # A client has connected meanwhile. Pages that are collapsed cost next to nothing the next time.
            self._chores.append(self._gather)

    def _on_owner_gone(self) -> None:
        self._selector.unregister(self._owner)
        self._kill_at = time.monotonic() + max(self._bounds.values(), default=0.0) + WARM_OWNERLESS_MARGIN()
        self.end()

    def _on_guard_gone(self) -> None:
        """Ends the server and all its descendants: without the guard, no process could find them later."""
        self._selector.unregister(self._guard)
        self._kill_at = time.monotonic()
        self.end()

    def end(self) -> None:
        """Stops accepting connections; a client that has just connected sees the connection close."""
        if not self._ending:
            self._ending = True
            self._selector.unregister(self._listener)
            self._place.close()
            self._listener.close()

    def _accept(self) -> None:
        if self._ending:
            return
        connection, _ = self._listener.accept()
        try:
            pid = self._serve(connection)
        except Exception as error:
            sys.stderr.write(f"a request failed: {error}\n")
            pid = None
        if pid is None:
            connection.close()
            return
        self._place.note_use()
        self._served_at = time.monotonic()
        self._agents[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_holder(pid, connection))
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._on_end(ended))

    def _serve(self, connection: socket.socket) -> int | None:
        """Forks the requested agent and returns its process id; None if the request dismisses the server."""
        connection.settimeout(WARM_REQUEST_TIMEOUT())
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
            if request.get("dismissed"):
                self.end()
                return None
            standard_input, log = descriptors
            if processes.readable([connection.fileno()], 0):
                raise ConnectionError("the client has given up")
            pid = forked.fork(
                supervise.main,
                title=f"rankzero.agent.supervise {request['title']}",
                env=request["env"],
                stdio=(standard_input, log, log),
                surroundings=request,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        # If the client is gone, the agent reads the end of its standard input, exits, and is reaped like the others.
        with contextlib.suppress(OSError):
            _tell(connection, {"pid": pid})
        self._bounds[pid] = float(request.get("end_timeout", 0.0))
        return pid

    def _on_holder(self, pid: int, connection: socket.socket) -> None:
        """Wakes the agent of a client that has closed its connection, in case the agent is stopped."""
        if self._agents.get(pid) is connection:
            self._selector.unregister(connection)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _on_child(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_READ)
        self._collect()

    def _on_end(self, pidfd: int) -> None:
        """Reaps an agent when its pidfd reports the exit, even if SIGCHLD is not delivered."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._collect()

    def _collect(self) -> None:
        for pid, status in processes.ended_children():
            self._bounds.pop(pid, None)
            if connection := self._agents.pop(pid, None):
                self._idle_since = time.monotonic()
                # Descendants of a killed agent are re-parented to this process; they are killed before the exit status
                # is sent.
                processes.kill_descendants(but=set(self._agents))
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    _tell(connection, {"status": status})
                connection.close()


@contextlib.contextmanager
def ending_with(owner: int | None, place: Place) -> Iterator[None]:
    """Exits this process during the block if its owner (a pidfd) exits: an import may take long, and runs no loop."""

    def exit_without_owner(*_: object) -> None:
        if owner is not None and processes.readable([owner], 0):
            try:
                place.remove()
            finally:
                os._exit(1)
        if time.monotonic() >= loading.give_up_at:
            raise TimeoutError

    signal.signal(signal.SIGALRM, exit_without_owner)
    signal.setitimer(signal.ITIMER_REAL, bounds.POLL_INTERVAL_LONG, bounds.POLL_INTERVAL_LONG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one line of JSON to the client (`rankzero.task.start`)."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Entry point of the server process.

    Its arguments: its directory, the path of its socket, the process id and the start time of its owner. Its standard
    input is the socket. A lock on its standard output shows that it or one of its forks, which import from its
    directory, lives.
    """
    directory, path, owner, started = sys.argv[1:]
    # Forks get another standard output.
    os.dup(1)
    listener = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    settle_signals()
    processes.become_subreaper()
    watched = os.pidfd_open(int(owner))
    if process_start(int(owner)) != started:
        raise SystemExit("the process that started this server has exited")
    place = Place(directory, path)
    with ending_with(watched, place):
        loading.load(loading.PRELOADED)
    os.environ.pop(forked.ROOM, None)
    server = WarmServer(place, listener, watched)
    if "torch" in sys.modules and not forked.touches_gpu():
        server.run()
    server.end()
    place.remove()
    # Skips exit handlers: `forked.prepare` has switched off what the libraries would undo, and they would complain.
    os._exit(0)
