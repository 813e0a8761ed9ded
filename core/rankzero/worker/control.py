"""A worker's end of its socket to the agent: one thread sends messages, another receives them."""

from __future__ import annotations

import contextlib
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

from rankzero import bounds
from rankzero.channel import messages
from rankzero.channel.messages import Decoder, Message, encode
from rankzero.errors import ResultError

M = TypeVar("M", bound=Message)

MAX_OUTGOING = 10_000
"""Messages in the queue above which `send` blocks."""

MAX_PATIENT = 1000
"""Queued messages above which a report is sent without waiting for the next delivery (`next_delivery`)."""

LARGE_REPORT = 64 << 10
"""Characters of a report from which on it is sent without waiting for the next delivery."""

MESSAGE_SIZE = 1 << 20
"""Most characters of reports in one message, and most bytes in one write, unless a single message has more."""

OUT_OF_REACH = 1000
"""Least number of the socket's descriptor. A program that closes its descriptors and opens a file gets low numbers, so
no file of the user ever replaces the socket."""


class Control:
    """The worker's end of its socket to the agent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=out_of_reach(fd))
        self._pid = os.getpid()
        self._last_words = ""
        os.register_at_fork(after_in_child=self._let_go)
        self._decoder = Decoder()
        self._received: deque[Message] = deque()
        self._outgoing: queue.SimpleQueue[str | bytes | threading.Event] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_called = False
        threading.Thread(target=self._write, name="rankzero-sender", daemon=True).start()
        self._early: list[Message] = []
        self._fetched: dict[str, messages.Fetched] = {}
        self._has_fetched = threading.Condition()
        self.ended = threading.Event()
        """Set once the agent has reported that every rank has committed."""

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
        self._await_room()
        self._put(encode(message))

    def report(self, row: str) -> None:
        """Sends a row of metrics, as JSON, in one message with rows that follow shortly; as safe as `send`."""
        self._require_own()
        self._await_room()
        self._put(row, patient=len(row) < LARGE_REPORT and self._outgoing.qsize() < MAX_PATIENT)

    def _await_room(self) -> None:
        while self._outgoing.qsize() > MAX_OUTGOING:
            # Polls, since a signal handler could find a lock taken.
            time.sleep(bounds.POLL_INTERVAL)

    def finish(self, outcome: messages.Finished | messages.Failed) -> None:
        """Queues the outcome of the rank; `flush` waits until it is sent."""
        self._last_words = (isinstance(outcome, messages.Failed) and outcome.traceback) or ""
        self.send(outcome)

    def flush(self) -> None:
        """Waits until all queued messages are sent. If the agent is dead, this process is ended anyway."""
        sent = threading.Event()
        self._put(sent)
        sent.wait()

    def _put(self, item: str | bytes | threading.Event, *, patient: bool = False) -> None:
        """Queues an item, and wakes the sender only if needed: each wake-up takes the GIL from the training."""
        self._outgoing.put(item)
        # After the item: the sender clears the flag before it reads the items.
        if not patient or not self._is_called:
            self._is_called = True
            self._calls.put(patient)

    def _write(self) -> None:
        try:
            self._deliver_forever()
        except BaseException:
            # Without a sender, the rank could report neither success nor failure.
            traceback.print_exc()
            os._exit(1)

    def _deliver_forever(self) -> NoReturn:
        earliest = 0.0
        while True:
            patient = self._calls.get()
            with contextlib.suppress(queue.Empty):
                while patient:
                    patient = self._calls.get(timeout=max(0.0, earliest - time.monotonic()))
            self._is_called = False
            self._deliver_all()
            earliest = next_delivery()

    def _deliver_all(self) -> None:
        batch = _Batch()
        # Items that are queued from here on wake the sender again.
        for _ in range(self._outgoing.qsize()):
            item = self._outgoing.get()
            if isinstance(item, str):
                batch.add_report(item)
            elif isinstance(item, bytes):
                batch.add(item)
            else:
                self._deliver(batch.take())
                item.set()
            if batch.size > MESSAGE_SIZE:
                self._deliver(batch.take())
        self._deliver(batch.take())

    def _deliver(self, data: bytes) -> None:
        if data:
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._end(error)

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

        An agent that still fetches files of its ranks receives `Go` when rank 0 is ready, and so before they start.
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
                data = self._socket.recv(MESSAGE_SIZE)
            except OSError as error:
                self._end(error)
            if not data:
                os._exit(1)
            self._received += (message for message, _ in self._decoder.feed(data))
        return self._received.popleft()

    def listen(self, on_checkpoint: Callable[[Message], None]) -> None:
        """Starts the thread that receives the agent's messages.

        Args:
            on_checkpoint: Receives the messages other than `End`, `Flush` and `Fetched`.
        """

        def take() -> None:
            while True:
                message = self._early.pop(0) if self._early else self._receive()
                if isinstance(message, messages.End):
                    self.ended.set()
                elif isinstance(message, messages.Flush):
                    self._put(encode(messages.Flushed()))
                elif isinstance(message, messages.Fetched):
                    with self._has_fetched:
                        self._fetched[message.name] = message
                        self._has_fetched.notify_all()
                else:
                    on_checkpoint(message)

        threading.Thread(target=take, name="rankzero-control", daemon=True).start()

    def fetch(self, name: str) -> str:
        """Makes the agent fetch a file that the driver offers. Requires `listen`.

        Returns:
            The file's path on this host.

        Raises:
            ResultError: the driver cannot read the file, or this host cannot write it.
        """
        with self._has_fetched:
            # A failure stays for other threads that wait for the same file, and is forgotten by the next request.
            if name in self._fetched and self._fetched[name].error is not None:
                del self._fetched[name]
        self.send(messages.Fetch(name))
        with self._has_fetched:
            self._has_fetched.wait_for(lambda: name in self._fetched)
            message = self._fetched[name]
        if message.error is not None:
            raise ResultError(f"{name} cannot be had from the driver: {message.error}")
        return message.path

    def beat(self, interval: float, progress: Callable[[], int]) -> None:
        """Starts the heartbeat thread, which reports the rank's progress to the agent.

        It sends nothing while native code keeps the GIL.

        Args:
            interval: Seconds between two heartbeats.
            progress: Returns the current progress.
        """

        def report() -> None:
            while not self.ended.is_set():
                self.send(messages.Beat(progress()))
                self.ended.wait(interval)

        threading.Thread(target=report, name="rankzero-heartbeat", daemon=True).start()


def out_of_reach(fd: int) -> int:
    """Moves a descriptor to a number from `OUT_OF_REACH` on, where the limit of open files allows it."""
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, OUT_OF_REACH)
    except OSError:
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return moved


class _Batch:
    """Frames in their order, in which consecutive reports become one frame."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._rows: list[str] = []
        self.size = 0

    def add(self, frame: bytes) -> None:
        self._join_reports()
        self._frames.append(frame)
        self.size += len(frame)

    def add_report(self, row: str) -> None:
        self._rows.append(row)
        self.size += len(row)

    def take(self) -> bytes:
        """Returns the bytes of the batch and empties it."""
        self._join_reports()
        data = b"".join(self._frames)
        self._frames.clear()
        self.size = 0
        return data

    def _join_reports(self) -> None:
        if self._rows:
            # The rows are JSON already.
            line = f'["{messages.Metrics.__name__}",null,{{"rows":[' + ",".join(self._rows) + "]}]\n"
            self._frames.append(line.encode())
            self._rows.clear()


def next_delivery() -> float:
    """Returns the next moment at which messages that may wait are sent, the same in every process of a host.

    Each delivery wakes the agent, the channel and the driver, so messages that are sent together wake them once. The
    first message after a quiet time is sent immediately, and an urgent message takes waiting ones along.
    """
    return (time.monotonic() // bounds.DELIVERY_INTERVAL + 1) * bounds.DELIVERY_INTERVAL
