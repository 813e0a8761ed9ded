"""`HangWatch`: distinguishes a run that hangs from a slow one."""

from __future__ import annotations

from collections.abc import Callable

from rankzero.bounds import MEET_TIMEOUT
from rankzero.driver import policy


class HangWatch:
    """Tracks the last progress of every rank, and requests their stacks before it reports a hang."""

    def __init__(self, num_processes: int, request_stacks: Callable[[], None]) -> None:
        """Creates a watch that has not seen any rank yet.

        Args:
            num_processes: Number of ranks.
            request_stacks: Requests the stacks of all ranks.
        """
        self._ranks = range(num_processes)
        self._request_stacks = request_stacks
        self._progress: dict[int, tuple[int, float]] = {}
        self._returned: set[int] = set()
        self._began: float | None = None
        self._stacks: dict[int, str] = {}
        self._stacks_deadline: float | None = None

    def on_beat(self, rank: int, progress: int, now: float) -> None:
        """Records a rank's progress counter; heartbeats of a rank that has returned do not count."""
        if rank in self._returned:
            return
        if rank not in self._progress or self._progress[rank][0] != progress:
            self._progress[rank] = progress, now

    def on_return(self, rank: int, now: float) -> None:
        """Records that a rank's code has returned, its last progress: storing its value has no time limit."""
        self._returned.add(rank)
        self._progress[rank] = -1, now

    @property
    def returned(self) -> frozenset[int]:
        """The ranks whose code has returned."""
        return frozenset(self._returned)

    @property
    def progress_at(self) -> float:
        """Monotonic time of the last progress or return of any rank."""
        return max((when for _, when in self._progress.values()), default=0.0)

    def on_stack(self, rank: int, text: str) -> None:
        """Records the stack that a rank sent."""
        self._stacks[rank] = text

    def poll(self, now: float, bound: float) -> dict[int, str] | None:
        """Returns the stack of each rank if the run hangs; None if it does not, or if stacks are still missing.

        The caller polls this from when every rank has started; progress counts from the first call.

        Args:
            now: Monotonic time.
            bound: Seconds without progress of any rank after which a run hangs.
        """
        if self._began is None:
            self._began = now
        for rank in self._ranks:
            # A rank without any heartbeat may hang, too. It has `MEET_TIMEOUT` more, to reach rank 0.
            self._progress.setdefault(rank, (-1, self._began + MEET_TIMEOUT))
        if self._returned.issuperset(self._ranks):
            return None
        if not policy.is_hung((when for _, when in self._progress.values()), now, bound):
            self._stacks_deadline = None
        elif self._stacks_deadline is None:
            self._stacks.clear()
            self._stacks_deadline = now + policy.STACKS_WINDOW
            self._request_stacks()
        elif now > self._stacks_deadline or len(self._stacks) == len(self._ranks):
            return {rank: self._stacks.get(rank, "no answer: its agent or the network hangs") for rank in self._ranks}
        return None
