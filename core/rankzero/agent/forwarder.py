"""Reads what the ranks of one task send and print, and forwards it to the driver."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import IO, Any

from rankzero import bounds
from rankzero.agent.inputs import Requests
from rankzero.agent.ranks import Ending, Rank
from rankzero.channel import messages
from rankzero.channel.client import ChannelClient
from rankzero.channel.messages import FINISHED, Message, decode, encode
from rankzero.worker.control import next_delivery

CUT_OFF_GRACE = bounds.stretched(5.0)  # To exit for a rank that has closed its connection too early
DRAIN_READS = 16  # Most reads that drain a pipe; a limit, because a child may write without end
READ_SIZE = 1 << 18  # Most bytes of one read


class Loop(selectors.DefaultSelector):
    """A selector that calls a function for each source that can be read."""

    def watch(self, source: Any, callback: Callable[[], object]) -> None:
        """Calls a function whenever a source can be read."""
        self.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: Any) -> None:
        """Ends `watch`, if it has not ended."""
        with contextlib.suppress(KeyError, ValueError):
            self.unregister(source)

    def watch_end(self, process: int, callback: Callable[[], object]) -> None:
        """Calls a function once, when the process of a pidfd or of the other end of a pipe has exited."""

        def on_end() -> None:
            self.unwatch(process)
            callback()

        self.watch(process, on_end)

    def dispatch(self, timeout: float | None) -> None:
        """Waits for the next source, and calls its function."""
        for key, _ in self.select(timeout):
            key.data()


class Forwarder:
    """Reads the messages, lines and stacks of ranks, and queues what the driver needs of them on the channel."""

    def __init__(self, loop: Loop, client: ChannelClient, ending: Ending, scratch: str) -> None:
        """Prepares to read; `listen` begins for one rank.

        Args:
            loop: Calls this object when a rank has written.
            client: The channel to the driver.
            ending: The end of the ranks, which decides whether a failure is the first cause.
            scratch: Directory of the task.
        """
        self._loop = loop
        self._client = client
        self._ending = ending
        self._scratch = scratch
        self.requests = Requests(client.fetch, scratch)
        self._quiet: list[Rank] = []
        self._listen_at: float | None = None
        self._cut_off: dict[Rank, float] = {}

    def listen(self, rank: Rank) -> None:
        """Begins to read from a rank."""
        self._loop.watch(rank.control, lambda: self.on_control(rank))
        self._listen_to(rank)
        self._loop.watch(rank.stack_pipe, lambda: rank.take_stack(self._read(rank.stack_pipe) or b""))

    @property
    def next_at(self) -> list[float]:
        """Returns the monotonic times at which `step` has work."""
        return [*self._cut_off.values(), *([self._listen_at] if self._listen_at is not None else [])]

    def step(self, now: float) -> None:
        """Reads again from quiet ranks, and kills ranks that closed their connection, when it is time."""
        for rank in [rank for rank, at in self._cut_off.items() if now >= at]:
            del self._cut_off[rank]
            self._on_cut_off(rank)
        if self._listen_at is not None and now >= self._listen_at:
            self._listen_at = None
            for rank in self._quiet:
                self._listen_to(rank)
            self._quiet.clear()

    def on_control(self, rank: Rank) -> bool:
        """Handles the messages of one read, so that a worker that never pauses cannot block the loop.

        Returns:
            True if there may be more.
        """
        try:
            data = rank.control.recv(READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(rank.control)
            self._cut_off[rank] = time.monotonic() + CUT_OFF_GRACE()
            return False
        rank.decoder.feed(data)
        for message in rank.decoder:
            assert isinstance(message, dict)
            self._on_rank_message(rank, decode(message))
        return True

    def _on_rank_message(self, rank: Rank, message: Message) -> None:
        if isinstance(message, messages.Fetch):
            self.requests.ask(rank, message.name)
            return
        rank.note(message)
        if isinstance(message, (messages.PartBegun, messages.Flushed)):
            return
        if isinstance(message, messages.Finished):
            # Lines that the rank printed before it committed must appear before that in the log.
            self.drain(rank, self.on_output)
            result = message.result
            if result and os.path.dirname(result["path"]) == self._scratch:
                then = encode(message, rank.local_rank)
                self._client.send_file("value", result["path"], then)
                return
            if self._ending.has_parts:
                # Behind its parts of checkpoints: the driver ends the run when all ranks have finished.
                self._client.send_file(f"{FINISHED}{rank.local_rank}", os.devnull, encode(message, rank.local_rank))
                return
        elif isinstance(message, messages.Failed):
            self.drain(rank, self.on_output)
            # A failure after SIGTERM is not the cause of the run's end.
            is_secondary = message.collateral or rank in self._ending.asked
            message = message.having(log_tail=rank.output.tail, collateral=is_secondary)
        elif isinstance(message, messages.Part) and not message.shared:
            self._ending.has_parts = True
            name = f"checkpoint-{message.index}-{rank.local_rank}"
            then = encode(message.having(upload=name), rank.local_rank)
            self._client.send_file(name, message.path, then)
            return
        rank.send(message)

    def _on_cut_off(self, rank: Rank) -> None:
        """Kills a rank that has closed its connection, and reports a failure: its outcome could not be received."""
        if not rank.alive or rank.outcome:
            return
        text = (
            f"it closed the connection to its agent and did not end within {CUT_OFF_GRACE():g} s: a rank must not "
            "replace its program (exec) or close descriptors that it has not opened"
        )
        self._on_rank_message(rank, messages.Failed(time.time(), message=text, exit_code=1))
        rank.kill(signal.SIGKILL)

    def _listen_to(self, rank: Rank) -> None:
        self._loop.watch(rank.pipe, lambda: self._on_printed(rank))

    def _on_printed(self, rank: Rank) -> None:
        """Forwards printed lines. A pipe with few lines is read again later, since each read wakes the driver."""
        if self.on_output(rank) and rank.output.is_quiet:
            self._loop.unwatch(rank.pipe)
            self._quiet.append(rank)
            if self._listen_at is None:
                self._listen_at = next_delivery()

    def on_output(self, rank: Rank) -> bool:
        """Adds the output of one read of a worker's pipe; returns True if there may be more."""
        data = self._read(rank.pipe)
        if data is None:
            return False
        if not data:
            rank.output.finish()
            return False
        rank.output.feed(data)
        return True

    def _read(self, source: IO[bytes]) -> bytes | None:
        """Reads once from a pipe: None if no data is available, empty bytes at the end of file."""
        try:
            data = source.read(READ_SIZE)
        except (OSError, ValueError):
            data = b""
        if data == b"":
            self._loop.unwatch(source)
        return data

    @staticmethod
    def drain(rank: Rank, read: Callable[[Rank], bool]) -> None:
        """Reads until a method of this object reports that there is no more, at most `DRAIN_READS` times."""
        for _ in range(DRAIN_READS):
            if not read(rank):
                return
