"""A worker's end of its socket to the agent, for which two threads send and receive; and the file of its reports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeVar

from rankzero.channel import messages
from rankzero.channel.messages import Decoder, Message, encode
from rankzero.errors import ResultError

M = TypeVar("M", bound=Message)

READ_SIZE = 1 << 20  # Most bytes that are received together

# Least number of the socket's descriptor: files that a program opens after it has closed all get low ones, not this.
OUT_OF_REACH = 1000


class Control:
    """The worker's end of its socket to the agent."""

    def __init__(self, fd: int, reports: int) -> None:
        """Starts the thread that sends.

        Args:
            fd: Descriptor of the socket.
            reports: Descriptor of the file to which reports are appended, and which the agent reads.
        """
        self._socket = socket.socket(fileno=out_of_reach(fd))
        self._reports = out_of_reach(reports)
        self._pid = os.getpid()
        self._last_words = ""
        os.register_at_fork(after_in_child=self._let_go)
        self._decoder = Decoder()
        self._received: deque[Message] = deque()
        self._outgoing: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._beat: tuple[float, Callable[[], int]] | None = None
        self._beat_at = 0.0
        threading.Thread(target=self._deliver, name="rankzero-sender", daemon=True).start()
        self._early: list[Message] = []
        self._transferred: dict[str, messages.Transferred] = {}
        self._has_transferred = threading.Condition()
        self.ended = threading.Event()  # Set once the agent has reported that every rank has committed
        self.exit_timeout = 0.0  # Seconds that the exit of this rank may take from then on

    @property
    def is_own(self) -> bool:
        """True in the rank's own process, False in a process that the rank has forked."""
        return os.getpid() == self._pid

    def _let_go(self) -> None:
        """Closes the socket in a forked child, which has no sender thread and is no rank."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _require_own(self) -> None:
        if not self.is_own:
            raise RuntimeError(
                f"process {os.getpid()} was forked by a rank (process {self._pid}), and only the rank itself has a "
                "connection to its agent"
            )

    def send(self, message: Message) -> None:
        """Sends a message; safe from any thread, and from a signal handler that interrupts this call."""
        self._require_own()
        self._outgoing.put(encode(message))

    def report(self, row: str) -> None:
        """Appends a row of metrics, as JSON, to the file of reports; as safe as `send`."""
        self._require_own()
        data = row.encode() + b"\n"
        try:
            # One call, so that rows of several threads do not mix.
            written = os.write(self._reports, data)
        except OSError as error:
            self._end(error)
        if written < len(data):
            self._end(OSError(errno.ENOSPC, "a report was not written"))

    def finish(self, outcome: messages.Finished | messages.Failed) -> None:
        """Queues the outcome of the rank; `flush` waits until it is sent."""
        self._last_words = (isinstance(outcome, messages.Failed) and outcome.traceback) or ""
        self.send(outcome)

    def flush(self) -> None:
        """Waits until all queued messages are sent. If the agent is dead, this process is ended anyway."""
        sent = threading.Event()
        self._outgoing.put(sent)
        sent.wait()

    def _deliver(self) -> None:
        try:
            while True:
                item: bytes | threading.Event = b""
                with contextlib.suppress(queue.Empty):
                    left = max(0.0, self._beat_at - time.monotonic()) if self._beat else None
                    item = self._outgoing.get(timeout=left)
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                if self._beat and time.monotonic() >= self._beat_at:
                    interval, progress = self._beat
                    self._beat_at = time.monotonic() + interval
                    item += encode(messages.Beat(progress()))
                self._socket.sendall(item)
        except OSError as error:
            self._end(error)
        except BaseException:
            # Without a sender, the rank could report neither success nor failure.
            traceback.print_exc()
            os._exit(1)

    def _end(self, error: OSError) -> NoReturn:
        """Exits this process, since a rank without its connection can report neither success nor failure."""
        text = (
            f"{self._last_words}rankzero: this rank has lost the connection to its agent ({error}) and ends. Code that "
            "closes the descriptors of its process, as daemons do, closes that connection, too\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        os._exit(1)

    def expect(self, kind: type[M]) -> M:
        """Waits for a message of this kind; others, which may overtake it, are kept for later.

        An agent that still fetches files of its ranks receives `Go` when rank 0 has bound, and so before they start.
        """
        for message in self._early:
            if isinstance(message, kind):
                self._early.remove(message)
                return message
        while not isinstance(message := self._receive(), kind):
            self._early.append(message)
        return message

    def _receive(self) -> Message:
        """Waits for the agent's next message; exits this process if the agent is dead."""
        while not self._received:
            try:
                data = self._socket.recv(READ_SIZE)
            except OSError as error:
                self._end(error)
            if not data:
                os._exit(1)
            self._received += (message for message, _ in self._decoder.feed(data))
        return self._received.popleft()

    def listen(self, on_checkpoint: Callable[[Message], None]) -> None:
        """Starts the thread that receives the agent's messages.

        Args:
            on_checkpoint: Receives the messages other than `End` and `Transferred`.
        """

        def take() -> None:
            while True:
                message = self._early.pop(0) if self._early else self._receive()
                if isinstance(message, messages.End):
                    self.ended.set()
                elif isinstance(message, messages.Transferred):
                    with self._has_transferred:
                        self._transferred[message.name] = message
                        self._has_transferred.notify_all()
                else:
                    on_checkpoint(message)

        threading.Thread(target=take, name="rankzero-control", daemon=True).start()

    def fetch(self, name: str) -> str:
        """Makes the agent fetch a file that the driver offers, and returns its path on this host. Requires `listen`.

        Raises:
            ResultError: the driver cannot read the file, or this host cannot write it.
        """
        message = self._transfer(messages.Transfer(name))
        if message.error is not None:
            raise ResultError(f"{name} cannot be had from the driver: {message.error}")
        return message.path

    def put(self, name: str, path: str) -> str | None:
        """Makes the agent send a file to the driver. Returns the error if it has not arrived, else None."""
        return self._transfer(messages.Transfer(name, path)).error

    def _transfer(self, request: messages.Transfer) -> messages.Transferred:
        name = request.name
        with self._has_transferred:
            # A failure stays for other threads that wait for the same file, and is forgotten by the next request.
            if name in self._transferred and self._transferred[name].error is not None:
                del self._transferred[name]
        self.send(request)
        with self._has_transferred:
            self._has_transferred.wait_for(lambda: name in self._transferred)
            return self._transferred[name]

    def beat(self, interval: float, progress: Callable[[], int]) -> None:
        """Makes the sender report the rank's progress each ``interval`` seconds, unless native code keeps the GIL."""
        self._beat_at, self._beat = time.monotonic() + interval, (interval, progress)
        # The thread waits without a limit.
        self._outgoing.put(b"")


def out_of_reach(fd: int) -> int:
    """Moves a descriptor to a number from `OUT_OF_REACH` on, where the limit of open files allows it."""
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, OUT_OF_REACH)
    except OSError:
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return moved
