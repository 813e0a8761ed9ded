"""How the ranks of one task end, and with them their agent: SIGTERM, then SIGKILL, their last lines delivered."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from rankzero.agent.output import PUMP_INTERVAL
from rankzero.agent.ranks import Rank
from rankzero.channel.agent_end.client import ChannelClient
from rankzero.errors import LOST
from rankzero.worker.leaving import cut_off_message

EXIT_MARGIN = 1.0
"""Seconds after ``exit_timeout`` for workers to end themselves and name what they cut off."""

FAREWELL_PATIENCE = 15.0
"""Seconds without any line taken by the driver after which the rest is given up, after a success."""

FAREWELL_LIMIT = 600.0
"""Seconds for all of them."""

STOP_FAREWELL_TIMEOUT = 1.5
"""Seconds to deliver the last lines after a failure or a cancel."""

FIRST_LOOK = 0.001
"""Seconds to the first of the looks whether the driver has taken the last lines; the pauses double."""


class Ending:
    """The end of the ranks of one task.

    Attributes:
        has_begun: The ranks were asked to exit.
        is_early: They were asked before all had committed.
        is_orphaned: The process that held the agent has exited.
        kill_at: Monotonic time at which those that live are killed; None if they may go on.
    """

    def __init__(self, ranks: Sequence[Rank], client: ChannelClient, grace: float, exit_timeout: float) -> None:
        """Nothing ends yet.

        Args:
            ranks: Those of the task, also those that are started later.
            client: Where the final messages and lines go.
            grace: Seconds between SIGTERM and SIGKILL where nobody asks for others.
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
        self._released: list[Rank] = []
        self._asked: set[Rank] = set()
        self._writing: dict[Rank, frozenset[int]] = {}
        self._stop_by = 0.0
        self.has_parts = False
        """Parts of checkpoints were given to the channel: they may take the rest of the grace."""

    @property
    def is_complete(self) -> bool:
        """True if the ranks were asked to exit and have exited."""
        return self.has_begun and not any(rank.alive for rank in self._ranks)

    def stop(self, grace: float | None = None) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds; a second call can only hurry."""
        deadline = time.monotonic() + (self._grace if grace is None else grace)
        self._stop_by = deadline if self.kill_at is None else min(self._stop_by, deadline)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.is_early = True
        if not self.has_begun:
            self.has_begun = True
            self._asked = set()
            self._writing = {rank: frozenset(rank.writing) for rank in self._ranks}
            self.ask_written()

    def ask_written(self) -> None:
        """Sends SIGTERM to each rank that has written what it had begun when the end began.

        Most ranks have no handler for it: the signal would end them in the midst of a checkpoint that was reported.
        """
        for rank, begun in self._writing.items():
            if rank not in self._asked and not begun & rank.writing:
                self._asked.add(rank)
                rank.kill(signal.SIGTERM)

    def leave(self, why: str, cause: str) -> None:
        """Stops, and reports the reason to the driver, which did not ask for that."""
        if not self.has_begun:
            self._client.queue({"type": "leaving", "why": why, "cause": cause})
        self.stop()

    def orphan(self) -> None:
        """Leaves, because the process that held its ranks has exited."""
        if self.is_orphaned:
            return
        self.is_orphaned = True
        self.leave("the process that held its ranks died (executor, driver or JVM)", LOST)

    def release(self) -> None:
        """Nobody hears of these ranks any more: those that have committed need not wait for their peers."""
        for rank in self._ranks:
            if rank.outcome == "commit" and rank not in self._released:
                self._released.append(rank)
                rank.tell({"type": "end"})

    def await_exits(self) -> None:
        """All ranks have ended: lets them run their exit handlers, and rank 0 go; within the grace if there is one."""
        for rank in self._ranks:
            rank.tell({"type": "end"})
        self.has_begun = True
        if not self.is_early:
            self.kill_at = time.monotonic() + self._exit_timeout + EXIT_MARGIN

    def kill_overdue(self, now: float) -> None:
        """SIGKILL to all ranks, once their time is over."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            for rank in self._ranks:
                if rank.alive and not self.is_early:
                    what = "native code that holds the interpreter's lock"
                    rank.output.add([cut_off_message(self._exit_timeout, what)])
                rank.kill(signal.SIGKILL)

    def say_goodbye(self, look: Callable[[float], None]) -> None:
        """Delivers the lines that wait: as long as the driver takes them, or briefly if the run is stopped.

        Args:
            look: Handles what comes within so many seconds.
        """
        deadline = progress_at = now = time.monotonic()
        deadline += STOP_FAREWELL_TIMEOUT if self.is_early else FAREWELL_LIMIT
        left, pause = self._waiting(), FIRST_LOOK
        while left and now < min(deadline, progress_at + FAREWELL_PATIENCE):
            for rank in self._ranks:
                rank.output.pump()
            look(pause)
            pause = min(2 * pause, PUMP_INTERVAL)
            now = time.monotonic()
            if self.is_early:
                # A stop, or the end of who holds this agent, may come meanwhile.
                deadline = min(deadline, now + STOP_FAREWELL_TIMEOUT)
            if (waiting := self._waiting()) != left:
                left, progress_at = waiting, now
        for rank in self._ranks:
            rank.output.drop_rest()
        has_parts = self.has_parts and not self.is_orphaned
        self._client.close(max(STOP_FAREWELL_TIMEOUT, self._stop_by - time.monotonic() if has_parts else 0.0))

    def _waiting(self) -> int:
        """Bytes of lines that the driver has not taken."""
        return self._client.bulk_bytes + sum(rank.output.waiting for rank in self._ranks)
