"""Ends the ranks of one task and their agent: SIGTERM, then SIGKILL, then delivery of the last log lines."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from rankzero import bounds
from rankzero.agent.ranks import Rank
from rankzero.channel import messages
from rankzero.channel.agent_end.client import ChannelClient
from rankzero.errors import LOST
from rankzero.worker.leaving import cut_off_message


class Ending:
    """The end of the ranks of one task.

    Attributes:
        has_begun: The ranks were asked to exit.
        is_early: The ranks were asked to exit before all had committed.
        is_orphaned: The task process that started the agent has exited.
        kill_at: Monotonic time at which the remaining ranks get SIGKILL; None if no such time is set.
        flush_by: Monotonic time until which a stop waits for the reports that ranks still hold; None without one.
    """

    def __init__(self, ranks: Sequence[Rank], client: ChannelClient, grace: float, exit_timeout: float) -> None:
        """Prepares the end; sends no signal yet.

        Args:
            ranks: The ranks of the task; the caller may still append to the list.
            client: The channel that carries the final messages and lines.
            grace: Seconds between SIGTERM and SIGKILL unless `stop` is given another value.
            exit_timeout: Seconds that committed workers get to run their exit handlers.
        """
        self._ranks = ranks
        self._client = client
        self._grace = grace
        self._exit_timeout = exit_timeout
        self.has_begun = False
        self.is_early = False
        self.is_orphaned = False
        self.kill_at: float | None = None
        self.flush_by: float | None = None
        self._released: list[Rank] = []
        self._asked: set[Rank] = set()
        self._writing: dict[Rank, frozenset[int]] = {}
        self._stop_by = 0.0
        self.has_parts = False
        """True once parts of checkpoints are queued on the channel: their delivery may use the rest of the grace."""

    @property
    def is_complete(self) -> bool:
        """True if the ranks were asked to exit and have exited."""
        return self.has_begun and not any(rank.alive for rank in self._ranks)

    def stop(self, grace: float | None = None) -> None:
        """Sends SIGTERM now and SIGKILL after ``grace`` seconds; a second call can only shorten the grace."""
        now = time.monotonic()
        deadline = now + (self._grace if grace is None else grace)
        self._stop_by = deadline if self.kill_at is None else min(self._stop_by, deadline)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.is_early = True
        if not self.has_begun:
            self.has_begun = True
            self._asked = set()
            self._writing = {rank: frozenset(rank.writing) for rank in self._ranks}
            self.flush_by = now + bounds.FLUSH_TIMEOUT
            for rank in self._ranks:
                rank.tell(messages.Flush())
            self.ask_written(now)

    def ask_written(self, now: float) -> None:
        """Sends SIGTERM to each rank whose reports are sent, and whose checkpoints begun before the stop are written.

        Most ranks have no handler for SIGTERM: it would kill them before they send what was reported.
        """
        if self.flush_by is not None and now >= self.flush_by:
            self.flush_by = None
        for rank, begun in self._writing.items():
            has_flushed = self.flush_by is None or rank.has_flushed or rank.outcome is not None or not rank.alive
            if rank not in self._asked and has_flushed and not begun & rank.writing:
                self._asked.add(rank)
                rank.kill(signal.SIGTERM)

    def leave(self, why: str, cause: str) -> None:
        """Stops the ranks without a request of the driver, and reports the reason to it."""
        if not self.has_begun:
            self._client.queue(messages.encode(messages.Leaving(why, cause)))
        self.stop()

    def orphan(self) -> None:
        """Stops the ranks because the task process that started this agent has exited."""
        if self.is_orphaned:
            return
        self.is_orphaned = True
        self.leave("the process that held its ranks died (executor, driver or JVM)", LOST)

    def release(self) -> None:
        """Lets the ranks that have committed exit: without a driver, waiting for their peers is of no use."""
        for rank in self._ranks:
            if isinstance(rank.outcome, messages.Finished) and rank not in self._released:
                self._released.append(rank)
                rank.tell(messages.End())

    def await_exits(self) -> None:
        """Lets all ranks run their exit handlers and exit, once each has finished; a `stop` keeps its grace."""
        for rank in self._ranks:
            rank.tell(messages.End())
        self.has_begun = True
        if not self.is_early:
            self.kill_at = time.monotonic() + self._exit_timeout + bounds.WORKER_EXIT_MARGIN

    def kill_overdue(self, now: float) -> None:
        """Sends SIGKILL to all ranks once `kill_at` has passed."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            for rank in self._ranks:
                if rank.alive and not self.is_early:
                    what = "native code that holds the interpreter's lock"
                    rank.output.add([cut_off_message(self._exit_timeout, what)])
                rank.kill(signal.SIGKILL)

    def deliver_last_lines(self, dispatch: Callable[[float], None]) -> None:
        """Delivers the lines that wait, for as long as the driver accepts them, or briefly if the run is stopped.

        Args:
            dispatch: Handles the events of the agent's loop that arrive within the given seconds.
        """
        deadline = progress_at = now = time.monotonic()
        deadline += bounds.STOPPED_LINES_TIMEOUT if self.is_early else bounds.LAST_LINES_TIMEOUT
        left, pause = self._waiting(), bounds.LAST_LINES_POLL_INTERVAL
        while left and now < min(deadline, progress_at + bounds.LAST_LINES_STALL_TIMEOUT):
            for rank in self._ranks:
                rank.output.pump()
            dispatch(pause)
            pause = min(2 * pause, bounds.POLL_INTERVAL_SHORT)
            now = time.monotonic()
            if self.is_early:
                # A stop, or the death of the task process, may have arrived in this loop.
                deadline = min(deadline, now + bounds.STOPPED_LINES_TIMEOUT)
            if (waiting := self._waiting()) != left:
                left, progress_at = waiting, now
        for rank in self._ranks:
            rank.output.drop_rest()
        has_parts = self.has_parts and not self.is_orphaned
        self._client.close(max(bounds.STOPPED_LINES_TIMEOUT, self._stop_by - time.monotonic() if has_parts else 0.0))

    def _waiting(self) -> int:
        """Returns the bytes of lines that the driver has not accepted."""
        return self._client.bulk_bytes + sum(rank.output.waiting for rank in self._ranks)
