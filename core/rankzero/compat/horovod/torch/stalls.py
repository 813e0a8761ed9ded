"""Finds the ranks for which other ranks wait, and logs warnings that name them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.distributed import distributed_c10d

from rankzero import bounds

logger = logging.getLogger(__name__)


class Roll:
    """Finds the ranks of a set that have not come to a slow round, by their entries in torch's store.

    Args:
        store: Store of the ranks, with a prefix for this set.
        ranks: Global ranks of the set.
        rank: Index of this rank in the set.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._answered = 0

    def answer(self, number: int) -> list[int]:
        """Records that this rank has come to a round.

        Returns:
            Global ranks that have not recorded it; an empty list if the store is closed.
        """
        try:
            if number > self._answered:
                self._answered = number
                self._store.set(str(self._rank), str(number))
            others = [index for index in range(len(self._ranks)) if index != self._rank]
            return [self._ranks[index] for index in others if not self._came(index, number)]
        except RuntimeError:
            return []

    def _came(self, index: int, number: int) -> bool:
        key = str(index)
        return bool(self._store.check([key])) and int(self._store.get(key)) >= number


def roll_of(group: Any, ranks: Sequence[int], rank: int) -> Roll:
    """Returns the roll of the ranks of a process group, whose name is the prefix of its entries."""
    store = distributed_c10d._get_default_store()
    return Roll(distributed_c10d.PrefixStore(f"rankzero.horovod.{group.group_name}", store), ranks, rank)


class Waiting(Protocol):
    """A set of ranks in which this rank may wait for others."""

    warn_after: float

    def stall(self) -> float:
        """Returns the seconds for which the current round has waited for a rank."""
        ...

    def call_roll(self) -> str:
        """Records that this rank is in its round; returns which ranks are missing, and what this rank waits for."""
        ...


class Watcher:
    """Logs warnings about ranks for which this rank has waited long, in a thread, until it is stopped.

    Args:
        sets: Returns the current sets of ranks.
    """

    def __init__(self, sets: Callable[[], Sequence[Waiting]]) -> None:
        self._sets = sets
        self._warn_at: dict[Waiting, float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="rankzero-horovod-stalls", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread without waiting for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(bounds.POLL_INTERVAL_LONGEST):
            for group in self._sets():
                if group.stall() >= bounds.POLL_INTERVAL_LONGEST:
                    self._check(group)
                else:
                    self._warn_at.pop(group, None)

    def _check(self, group: Waiting) -> None:
        found, stall = group.call_roll(), group.stall()
        if stall >= self._warn_at.setdefault(group, group.warn_after):
            self._warn_at[group] = stall + group.warn_after
            logger.warning("%s", found)
