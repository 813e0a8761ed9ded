"""`Ending`: the end of the ranks of one task: SIGTERM, then SIGKILL."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

from rankzero import bounds
from rankzero.agent.output import Outbox
from rankzero.agent.ranks import Rank
from rankzero.channel import messages
from rankzero.errors import LOST
from rankzero.worker.call import cut_off_message

WORKER_EXIT_MARGIN = bounds.stretched(4.0)  # To exit for a rank whose exit_timeout is over
FLUSH_TIMEOUT = bounds.stretched(1.0)  # For stopped ranks to send reports that they hold; native code may not answer


class Ending:
    """The end of the ranks of one task.

    Attributes:
        has_begun: The ranks were asked to exit.
        is_early: The ranks were asked to exit before all had committed.
        is_orphaned: The task process that started the agent has exited.
        is_alone: The driver is lost, or the task process has exited: ranks that have committed need not wait.
        is_agreed: The driver has sent `End`: the task has not failed, whatever happens later.
        asked: The ranks that were sent SIGTERM.
        complete: Set once the ranks were asked to exit and have exited.
        stop_by: Monotonic time at which a stopped rank gets SIGKILL.
    """

    def __init__(self, ranks: Sequence[Rank], outbox: Outbox, grace: float, exit_timeout: float) -> None:
        """Prepares the end; sends no signal yet.

        Args:
            ranks: The ranks of the task.
            outbox: The way of messages to the driver.
            grace: Seconds between SIGTERM and SIGKILL unless `stop` is given another value.
            exit_timeout: Seconds that committed workers get to run their exit handlers.
        """
        self._ranks = ranks
        self._outbox = outbox
        self._grace = grace
        self._exit_timeout = exit_timeout
        self.has_begun = self.is_early = self.is_orphaned = self.is_alone = self.is_agreed = False
        self.asked: set[Rank] = set()
        self.complete = asyncio.Event()
        self.stop_by = float("inf")
        self._kill: asyncio.TimerHandle | None = None
        self._flush_by = 0.0

    def check(self) -> None:
        """Sets `complete` if the end has come."""
        if self.has_begun and not any(rank.alive for rank in self._ranks):
            self.complete.set()

    def stop(self, grace: float | None = None) -> None:
        """Sends SIGTERM now and SIGKILL after ``grace`` seconds; a second call can only shorten the grace."""
        now = time.monotonic()
        self.stop_by = min(self.stop_by, now + (self._grace if grace is None else grace))
        self.is_early = True
        self._kill_at(self.stop_by)
        if not self.has_begun:
            self.has_begun = True
            self._flush_by = now + min(FLUSH_TIMEOUT(), (self.stop_by - now) / 2)
            for rank in self._ranks:
                rank.begun = frozenset(rank.writing)
                rank.tell(messages.Flush())
            asyncio.get_running_loop().call_at(self._flush_by, self.ask_written)
            self.ask_written()
        self.check()

    def ask_written(self) -> None:
        """Sends SIGTERM to each rank whose reports are sent, and whose checkpoints begun before the stop are written.

        Most ranks have no handler for SIGTERM: it would kill them before they send what was reported.
        """
        is_over = time.monotonic() >= self._flush_by
        for rank in self._ranks:
            has_flushed = is_over or rank.has_flushed or rank.outcome is not None or not rank.alive
            is_written = rank.begun is not None and not rank.begun & rank.writing
            if rank not in self.asked and has_flushed and is_written:
                self.asked.add(rank)
                rank.kill(signal.SIGTERM)

    def leave(self, why: str, cause: str) -> None:
        """Stops the ranks without a request of the driver, and reports the reason to it."""
        if not self.has_begun:
            self._outbox.send(messages.Leaving(why, cause))
        self.stop()

    def orphan(self) -> None:
        """Stops the ranks because the task process that started this agent has exited."""
        if not self.is_orphaned:
            self.is_orphaned = True
            self.leave("the process that held its ranks died (executor, driver or JVM)", LOST)
            self.release()

    def release(self) -> None:
        """Lets the ranks that have committed exit: without a driver, waiting for their peers is of no use."""
        self.is_alone = True
        for rank in self._ranks:
            if isinstance(rank.outcome, messages.Finished):
                rank.tell(messages.End())

    def await_exits(self) -> None:
        """Lets all ranks run their exit handlers and exit, once each has finished; a `stop` keeps its grace."""
        self.has_begun = self.is_agreed = True
        for rank in self._ranks:
            rank.tell(messages.End())
        if not self.is_early:
            self._kill_at(time.monotonic() + self._exit_timeout + WORKER_EXIT_MARGIN())
        self.check()

    def _kill_at(self, when: float) -> None:
        if self._kill:
            self._kill.cancel()
        self._kill = asyncio.get_running_loop().call_at(when, self._kill_all)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.alive and not self.is_early:
                rank.output.add([cut_off_message(self._exit_timeout, "native code that holds the GIL")])
            rank.kill(signal.SIGKILL)
