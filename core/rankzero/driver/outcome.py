"""`Outcome`: what the ranks of an attempt made of it: commits and rank 0's value, or failures and their first cause."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.channel.frames import Message
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
    """Why an attempt cannot succeed any more, unless it is that an agent was lost."""

    RANKS_FAILED = enum.auto()
    REFUSED = enum.auto()
    ENGINE_ENDED = enum.auto()


class Outcome:
    """Collects what ranks report; says when success is certain, and when it is out of reach.

    Attributes:
        failures: What is known of each rank that failed, in the order in which that was heard.
        refusal: An error of the driver's own, such as a store that does not take the value; the last one counts.
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
        """The rank's code has ended well, and by itself; its checkpoints and its value are still to be stored."""
        self._returned.add(rank)

    def has_returned(self, rank: int) -> bool:
        """True if the rank's code has ended well before it was asked to."""
        return rank in self._returned

    def note_committed(self, rank: int) -> None:
        """The rank has done all that the run needs of it."""
        self._committed.add(rank)

    def note_result(self, rank: int, result: ResultRef, value: list[Any]) -> None:
        """The rank's value is stored, by which it has committed.

        Args:
            rank: Rank 0.
            result: The handle.
            value: The value itself in a list, if it is small JSON; else empty.
        """
        self._result = result, value
        self._committed.add(rank)

    def note_failure(self, rank: int, host: str, message: Message, now: float, *, was_told_to: bool) -> Failure | None:
        """What is known of the failure now; None for a rank that had committed, which no failure can hurt.

        Args:
            rank: The rank.
            host: Where it ran.
            message: Its, or its agent's, report.
            now: Monotonic time.
            was_told_to: Its agent is leaving: the rank was asked to exit, and may do that by an exception of its own.
        """
        if rank in self._committed:
            return None
        facts = {key: message[key] for key in _FAILURE_FACTS if message.get(key) is not None}
        if was_told_to:
            facts["collateral"] = True
        tail = tuple(line[:LOG_TAIL_WIDTH] for line in message.get("log_tail", ()))
        failure = Failure(rank=rank, host=host, order=len(self.failures), log_tail=tail, **facts)
        if not self.failures:
            self._first_failure_at = now
        self.failures.append(failure)
        return failure

    def note_over(self, rank: int) -> None:
        """The rank has said all that it has to say, or its process is gone: it needs no peer any more."""
        self._over.add(rank)

    @property
    def is_over(self) -> bool:
        """True once no rank needs another."""
        return len(self._over) >= self._num_processes

    def give_up(self) -> None:
        """What the ranks have stored is to be deleted: this is no success any more, whatever still comes."""
        self._is_given_up = True

    @property
    def success(self) -> tuple[ResultRef, list[Any]] | None:
        """Rank 0's handle, and the value in a list if it is small JSON, as soon as every rank has committed."""
        return self._result if len(self._committed) >= self._num_processes and not self._is_given_up else None

    def reason(self, now: float, gone: Sequence[Member], *, engine_ended: bool) -> Reason | Member | None:
        """Why the attempt cannot succeed any more: a `Reason`, or the agent that was lost; None if it still can.

        Args:
            now: Monotonic time.
            gone: Agents that went or are disconnected.
            engine_ended: The engine reports that all agents have ended.
        """
        if self.failures and is_conclusive(self.failures, now - self._first_failure_at):
            if gone and all(failure.collateral for failure in self.failures):
                # The peers of a lost host see broken connections only, also if it had nothing more to do itself.
                return gone[0]
            return Reason.RANKS_FAILED
        if self.refusal:
            return Reason.REFUSED
        # One whose ranks have all committed has done its part.
        needed = [member for member in gone if not member.ranks or not self._committed.issuperset(member.ranks)]
        left = [(member, member.left_at) for member in needed if member.left_at is not None]
        if engine_ended and not self.failures:
            # An agent that was asked to exit by somebody else ends as quietly as one that the driver asked.
            return left[0][0] if left else Reason.ENGINE_ENDED
        return next((member for member, at in left if now - at > policy.AGENT_LOST_WINDOW), None)
