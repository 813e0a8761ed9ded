"""A worker's end of its socket to the agent: messages out by a thread of their own, messages in by another."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rankzero.agent.pace import next_delivery
from rankzero.channel import frames
from rankzero.channel.frames import Message

MAX_OUTGOING = 10_000
"""Messages that may wait for the agent before the next one has to."""

ROOM_INTERVAL = 0.1
"""Seconds between two looks whether there is room for the next."""

MAX_REPORTS = 1000
"""Reports that wait for one delivery (see `pace`) at most."""

REPORT_LIMIT = 1 << 20
"""Characters of one report as JSON."""


class Control:
    """The worker's end of its socket to the agent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._decoder = frames.Decoder()
        self._decoder.trust(None)
        self._outgoing: queue.SimpleQueue[str | bytes | threading.Event] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_called = False
        self._room = threading.Event()
        threading.Thread(target=self._write, name="rankzero-sender", daemon=True).start()
        self.ended = threading.Event()
        """The agent said that every rank has committed."""

    def send(self, message: Message) -> None:
        """Sends a message; safe from any thread, and from a signal handler that interrupts this very call."""
        self._await_room()
        self._put(frames.encode(message))

    def report(self, metrics: dict[str, Any], when: float) -> None:
        """Sends metrics, together with those that follow shortly. Raises ValueError if they are too large."""
        self._await_room()
        row = json.dumps([metrics, when], separators=(",", ":"))
        if len(row) > REPORT_LIMIT:
            raise ValueError(
                f"the metrics of one report take {len(row)} characters, the limit is {REPORT_LIMIT}: "
                "report numbers and short strings, and return what is large or put it into the checkpoint"
            )
        self._put(row, patient=self._outgoing.qsize() < MAX_REPORTS)

    def _await_room(self) -> None:
        while self._outgoing.qsize() > MAX_OUTGOING:
            self._room.clear()
            self._room.wait(ROOM_INTERVAL)

    def flush(self) -> None:
        """Waits until everything was sent. A dead agent ends this process anyway."""
        sent = threading.Event()
        self._put(sent)
        sent.wait()

    def _put(self, item: str | bytes | threading.Event, *, patient: bool = False) -> None:
        """Puts it in line, and calls the sender only if it must: each call takes the training's interpreter lock."""
        self._outgoing.put(item)
        # After the item: the sender takes the call back before it looks at the items.
        if not patient or not self._is_called:
            self._is_called = True
            self._calls.put(patient)

    def _write(self) -> None:
        earliest = 0.0
        while True:
            patient = self._calls.get()
            with contextlib.suppress(queue.Empty):
                while patient:
                    patient = self._calls.get(timeout=max(0.0, earliest - time.monotonic()))
            self._is_called = False
            self._deliver_all()
            self._room.set()
            earliest = next_delivery()

    def _deliver_all(self) -> None:
        batch, rows = b"", _Rows()
        # What is put in line from here on has a call of its own.
        for _ in range(self._outgoing.qsize()):
            item = self._outgoing.get()
            if isinstance(item, str):
                batch += rows.add(item)
            elif isinstance(item, bytes):
                batch += rows.take() + item
            else:
                self._deliver(batch + rows.take())
                batch = b""
                item.set()
        self._deliver(batch + rows.take())

    def _deliver(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(data)

    def receive(self) -> Message:
        """Waits for the agent's next message; the agent's death ends this process."""
        while True:
            for message in self._decoder:
                assert isinstance(message, dict)
                return message
            data = self._socket.recv(frames.CHUNK)
            if not data:
                os._exit(1)
            self._decoder.feed(data)

    def listen(self, on_checkpoint: Callable[[Message], None]) -> None:
        """From here on a thread takes the agent's messages."""

        def take() -> None:
            while True:
                message = self.receive()
                if message["type"] == "end":
                    self.ended.set()
                else:
                    on_checkpoint(message)

        threading.Thread(target=take, name="rankzero-control", daemon=True).start()

    def beat(self, interval: float, progress: Callable[[], int]) -> None:
        """From here on a thread tells the agent how far this rank is.

        It stays silent while native code holds the interpreter's lock.
        """

        def tell() -> None:
            while not self.ended.is_set():
                self.send({"type": "beat", "progress": progress()})
                self.ended.wait(interval)

        threading.Thread(target=tell, name="rankzero-heartbeat", daemon=True).start()


class _Rows:
    """Reports that follow each other: one message, of a size that any frame holds."""

    def __init__(self) -> None:
        self._rows: list[str] = []
        self._size = 0

    def add(self, row: str) -> bytes:
        """Takes one more; gives the frame of those before if it does not fit in."""
        full = self.take() if self._size + len(row) > REPORT_LIMIT else b""
        self._rows.append(row)
        self._size += len(row)
        return full

    def take(self) -> bytes:
        """The frame of all, empty if there are none."""
        if not self._rows:
            return b""
        body = '{"type":"metric","rows":[' + ",".join(self._rows) + "]}"
        self._rows.clear()
        self._size = 0
        return frames.pack(b"J" + body.encode())
