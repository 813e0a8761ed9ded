"""Ranks that others wait for: who they are, and a warning that names them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
"""Seconds between two looks at what this rank waits for, and after which it notes that it is there."""


class Roll:
    """Which ranks of a set have come to a round that takes long, by what they note in torch's store.

    Args:
        store: Of the ranks, for this set alone.
        ranks: Global ranks of the set.
        rank: Index of this one.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._answered = 0

    def answer(self, number: int) -> list[int]:
        """Notes that this rank has come to a round.

        Returns:
            Global ranks of which that is not known; none if nobody can tell, as the store is gone.
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
    """The roll of the ranks of a process group, whose name all of them know it by."""
    store = distributed_c10d._get_default_store()
    return Roll(distributed_c10d.PrefixStore(f"rankzero.horovod.{group.group_name}", store), ranks, rank)


class Waiting(Protocol):
    """A set of ranks, as one of them knows it."""

    warn_after: float

    def stall(self) -> float:
        """Seconds for which the present round has waited for a rank."""
        ...

    def call_roll(self) -> str:
        """Notes that this rank is there; who is not, and what this rank waits for."""
        ...


class Watcher:
    """Warns of what some ranks have not issued for long, in a thread, until it is stopped.

    Args:
        sets: Gives the sets of ranks that there are.
    """

    def __init__(self, sets: Callable[[], Sequence[Waiting]]) -> None:
        self._sets = sets
        self._warn_at: dict[Waiting, float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="rankzero-horovod-stalls", daemon=True).start()

    def stop(self) -> None:
        """Ends it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_INTERVAL):
            for group in self._sets():
                if group.stall() >= LOOK_INTERVAL:
                    self._look(group)
                else:
                    self._warn_at.pop(group, None)

    def _look(self, group: Waiting) -> None:
        found, stall = group.call_roll(), group.stall()
        if stall >= self._warn_at.setdefault(group, group.warn_after):
            self._warn_at[group] = stall + group.warn_after
            logger.warning("%s", found)
