"""Reads what the ranks of one task send and print, and forwards it to the driver."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import IO

from rankzero import bounds
from rankzero.agent.ending import Ending
from rankzero.agent.ranks import Rank
from rankzero.channel import messages
from rankzero.channel.client import Driver
from rankzero.channel.messages import Message

CUT_OFF_GRACE = bounds.stretched(5.0)  # To exit for a rank that has closed its connection too early
DRAIN_READS = 16  # Most reads that drain a pipe; a limit, because a child may write without end
READ_SIZE = 1 << 18  # Most bytes of one read


class Forwarder:
    """Reads the messages, lines and stacks of ranks, and sends what the driver needs of them."""

    def __init__(self, driver: Driver, task: int, ending: Ending, scratch: str) -> None:
        """Prepares to read; `listen` begins for one rank.

        Args:
            driver: The driver, for files.
            task: Number of the task.
            ending: The end of the ranks, which decides whether a failure is the first cause.
            scratch: Directory of the task.
        """
        self._driver = driver
        self._task = task
        self._ending = ending
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self.uploads: asyncio.Queue[tuple[Rank, str, str, Message]] = asyncio.Queue()
        """Files to send, by name and path, and the message of a rank that follows each of them."""
        self.has_parts = False
        """True once parts of checkpoints are to be sent: their delivery may use the rest of the grace."""

    def listen(self, rank: Rank) -> None:
        """Begins to read from a rank."""
        self._loop.add_reader(rank.control, self.on_control, rank)
        self._loop.add_reader(rank.pipe, self._on_printed, rank)
        self._loop.add_reader(rank.stack_pipe, lambda: rank.take_stack(self._read(rank.stack_pipe) or b""))

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
            self._loop.remove_reader(rank.control)
            self._loop.call_later(CUT_OFF_GRACE(), self._on_cut_off, rank)
            return False
        for message, _ in rank.decoder.feed(data):
            self._on_rank_message(rank, message)
        if self._ending.is_early:
            self._ending.ask_written()
        return True

    def _on_rank_message(self, rank: Rank, message: Message) -> None:
        if isinstance(message, messages.Fetch):
            answer = asyncio.create_task(self._answer(rank, message.name))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
            return
        rank.note(message)
        if isinstance(message, (messages.PartBegun, messages.Flushed)):
            return
        if isinstance(message, messages.Finished):
            # Lines that the rank printed before it committed must appear before that in the log.
            self.drain(rank, self.on_output)
            result = message.result
            if result and os.path.dirname(result["path"]) == self._scratch:
                self.uploads.put_nowait((rank, f"{self._task}-value", result["path"], message))
                return
            if self.has_parts:
                # Behind its parts of checkpoints: the driver ends the run when all ranks have finished.
                self.uploads.put_nowait((rank, "", "", message))
                return
            if self._ending.is_alone:
                self._ending.release()
        elif isinstance(message, messages.Failed):
            self.drain(rank, self.on_output)
            # A failure after SIGTERM is not the cause of the run's end.
            is_secondary = message.collateral or rank in self._ending.asked
            message = dataclasses.replace(message, log_tail=rank.output.tail, collateral=is_secondary)
        elif isinstance(message, messages.Part) and not message.shared:
            self.has_parts = True
            name = f"{self._task}-checkpoint-{message.index}-{rank.local_rank}"
            self.uploads.put_nowait((rank, name, message.path, dataclasses.replace(message, upload=name)))
            return
        rank.send(message)

    async def _answer(self, rank: Rank, name: str) -> None:
        """Fetches a file that a rank requests, once for all ranks that do."""
        path = os.path.join(self._scratch, name)
        if name not in self._fetches:
            self._fetches[name] = asyncio.create_task(self._driver.fetch(name, path))
        try:
            await self._fetches[name]
        except OSError as error:
            self._fetches.pop(name, None)
            rank.tell(messages.Fetched(name, error=str(error)))
        else:
            rank.tell(messages.Fetched(name, path))

    async def upload(self) -> None:
        """Sends the files of ranks, one after the other, and the message that follows each. Never returns."""
        while True:
            rank, name, path, message = await self.uploads.get()
            try:
                if name:
                    await self._driver.put(name, path)
            except OSError as error:
                # The driver, which has not got the file, decides what that means.
                sys.stderr.write(f"{path} was not sent: {error}\n")
            rank.send(message)
            self.uploads.task_done()

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

    def _on_printed(self, rank: Rank) -> None:
        """Forwards printed lines. A pipe with few lines is read again later, since each read wakes the driver."""
        if self.on_output(rank) and (pause := rank.output.pause):
            self._loop.remove_reader(rank.pipe)
            self._loop.call_later(pause, self._listen_again, rank)

    def _listen_again(self, rank: Rank) -> None:
        # The pipe may have been read to its end meanwhile.
        if not rank.pipe.closed:
            self._loop.add_reader(rank.pipe, self._on_printed, rank)

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
        if data == b"" and not source.closed:
            self._loop.remove_reader(source)
            source.close()
        return data

    @staticmethod
    def drain(rank: Rank, read: Callable[[Rank], bool]) -> None:
        """Reads until a method of this object reports that there is no more, at most `DRAIN_READS` times."""
        for _ in range(DRAIN_READS):
            if not read(rank):
                return
