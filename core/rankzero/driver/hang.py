"""`HangWatch`: tells a run that hangs from one that is slow."""

from __future__ import annotations

from collections.abc import Callable

from rankzero.bounds import MEET_TIMEOUT
from rankzero.driver import policy


class HangWatch:
    """Knows every rank's last progress. Before it says that a run hangs, it asks for the stacks of its ranks."""

    def __init__(self, num_processes: int, ask_stacks: Callable[[], None]) -> None:
        """Starts to watch.

        Args:
            num_processes: Number of ranks.
            ask_stacks: Asks all ranks for their stacks.
        """
        self._ranks = range(num_processes)
        self._ask_stacks = ask_stacks
        self._progress: dict[int, tuple[int, float]] = {}
        self._returned: set[int] = set()
        self._began: float | None = None
        self._stacks: dict[int, str] = {}
        self._stacks_deadline: float | None = None

    def on_beat(self, rank: int, progress: int, now: float) -> None:
        """Takes a rank's count of what it has done; nothing more counts of one that has returned."""
        if rank in self._returned:
            return
        if rank not in self._progress or self._progress[rank][0] != progress:
            self._progress[rank] = progress, now

    def on_return(self, rank: int, now: float) -> None:
        """A rank's code has ended, which is its last progress: to store its value may take as long as it likes."""
        self._returned.add(rank)
        self._progress[rank] = -1, now

    @property
    def returned(self) -> frozenset[int]:
        """The ranks whose code has ended."""
        return frozenset(self._returned)

    @property
    def progress_at(self) -> float:
        """Monotonic time of the last progress or return of any rank."""
        return max((when for _, when in self._progress.values()), default=0.0)

    def on_stack(self, rank: int, text: str) -> None:
        """Takes a rank's answer."""
        self._stacks[rank] = text

    def look(self, now: float, bound: float) -> dict[int, str] | None:
        """Where each rank stands if the run hangs; None if it does not, or answers are still awaited.

        To be called when every rank has started; a rank's progress counts from the first call on.

        Args:
            now: Monotonic time.
            bound: Seconds without progress of any rank after which a run hangs.
        """
        if self._began is None:
            self._began = now
        for rank in self._ranks:
            # One that was stopped before its first heartbeat hangs, too; it may take so long to reach rank 0.
            self._progress.setdefault(rank, (-1, self._began + MEET_TIMEOUT))
        if self._returned.issuperset(self._ranks):
            return None
        if not policy.is_hung((when for _, when in self._progress.values()), now, bound):
            self._stacks_deadline = None
        elif self._stacks_deadline is None:
            self._stacks.clear()
            self._stacks_deadline = now + policy.STACKS_WINDOW
            self._ask_stacks()
        elif now > self._stacks_deadline or len(self._stacks) == len(self._ranks):
            return {rank: self._stacks.get(rank, "no answer: its agent or the network hangs") for rank in self._ranks}
        return None
