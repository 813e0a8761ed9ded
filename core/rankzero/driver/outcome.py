"""`Outcome`: what the ranks of an attempt reported: commits and rank 0's value, or failures."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.driver import policy
from rankzero.driver.failure import Failure, is_conclusive
from rankzero.driver.roster import Member
from rankzero.errors import RankZeroError
from rankzero.values.ref import ResultRef

_FAILURE_FACTS = (
    "exception_type",
    "message",
    "traceback",
    "exit_code",
    "signal",
    "collateral",
    "cause",
    "retryable",
    "matched",
)


class Reason(enum.Enum):
    """A reason other than a lost agent for which an attempt can no longer succeed."""

    RANKS_FAILED = enum.auto()
    REFUSED = enum.auto()
    ENGINE_ENDED = enum.auto()


class Outcome:
    """Collects the reports of ranks, and decides when success is certain or impossible.

    Attributes:
        failures: The facts about each rank that failed, in the order in which they arrived.
        refusal: An error of the driver itself, such as a store that refuses the value; the last one counts.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._returned: set[int] = set()
        self._committed: set[int] = set()
        self._over: set[int] = set()
        self._is_given_up = False
        self._result: tuple[ResultRef, list[Any]] | None = None
        self._first_failure_at = 0.0
        self.failures: list[Failure] = []
        self.refusal: RankZeroError | None = None

    def note_returned(self, rank: int) -> None:
        """Records that the rank's code returned by itself; its checkpoints and its value are still to be stored."""
        self._returned.add(rank)

    def has_returned(self, rank: int) -> bool:
        """Returns True if the rank's code returned before it was asked to stop."""
        return rank in self._returned

    def note_committed(self, rank: int) -> None:
        """Records that the rank has finished everything the run needs from it."""
        self._committed.add(rank)

    def note_result(self, rank: int, result: ResultRef, value: list[Any]) -> None:
        """Records that the rank's value is stored, which finishes the rank.

        Args:
            rank: Rank 0.
            result: The handle.
            value: The value itself in a list, if it is small JSON; else empty.
        """
        self._result = result, value
        self._committed.add(rank)

    def note_failure(
        self, rank: int, host: str, message: Mapping[str, Any], now: float, *, was_asked_to: bool
    ) -> Failure | None:
        """Records a failure and returns it; returns None for a rank that had committed, since its success stands.

        Args:
            rank: The rank.
            host: Host of the rank.
            message: The report of the rank or of its agent.
            now: Monotonic time.
            was_asked_to: True if its agent is leaving: the rank was asked to exit, and may do so by raising an
                exception.
        """
        if rank in self._committed:
            return None
        facts = {key: message[key] for key in _FAILURE_FACTS if message.get(key) is not None}
        if was_asked_to:
            facts["collateral"] = True
        tail = tuple(line[:LOG_TAIL_WIDTH] for line in message.get("log_tail", ()))
        failure = Failure(rank=rank, host=host, order=len(self.failures), log_tail=tail, **facts)
        if not self.failures:
            self._first_failure_at = now
        self.failures.append(failure)
        return failure

    def note_over(self, rank: int) -> None:
        """Records that the rank has sent its last report or its process is gone, so it needs no peer any more."""
        self._over.add(rank)

    @property
    def is_over(self) -> bool:
        """True once no rank needs a peer any more."""
        return len(self._over) >= self._num_processes

    def give_up(self) -> None:
        """Rules out success from now on, because the stored values and checkpoints are about to be deleted."""
        self._is_given_up = True

    @property
    def success(self) -> tuple[ResultRef, list[Any]] | None:
        """Rank 0's handle, and the value in a list if it is small JSON, as soon as every rank has committed."""
        return self._result if len(self._committed) >= self._num_processes and not self._is_given_up else None

    def reason(self, now: float, gone: Sequence[Member], *, engine_ended: bool) -> Reason | Member | None:
        """Returns why the attempt can no longer succeed, a `Reason` or the lost agent; None if it still can.

        Args:
            now: Monotonic time.
            gone: Agents that exited or are disconnected.
            engine_ended: The engine reports that all agents have ended.
        """
        if self.failures and is_conclusive(self.failures, now - self._first_failure_at):
            if gone and all(failure.collateral for failure in self.failures):
                # The peers of a lost host see only broken connections, even if that host had finished its own work.
                return gone[0]
            return Reason.RANKS_FAILED
        if self.refusal:
            return Reason.REFUSED
        # An agent whose ranks have all committed is no longer needed.
        needed = [member for member in gone if not member.ranks or not self._committed.issuperset(member.ranks)]
        left = [(member, member.left_at) for member in needed if member.left_at is not None]
        if engine_ended and not self.failures:
            # An agent that exits on a signal from outside is as silent as one that the driver asked to exit.
            return left[0][0] if left else Reason.ENGINE_ENDED
        return next((member for member, at in left if now - at > policy.AGENT_LOST_WINDOW), None)
