"""`Agreement`: what the ranks of a set have issued. Every rank hears the same, and so decides the same."""

from __future__ import annotations

from collections.abc import Sequence

from rankzero.compat.horovod.torch.errors import MismatchError, StallError
from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.messages import Meta, Said

DEADLOCK_ROUNDS = 2000
"""Rounds in which every rank waits, and for nothing that all have issued, before that is an error: some seconds."""

JOINED, SHUT_DOWN, WAITING = 1, 2, 4
"""Flags that a rank sends: it has joined, it issues nothing more, it waits for a result."""

Issued = dict[int, Meta]
"""What each rank issued under one name, by index of the rank."""


class Agreement:
    """Of one set of ranks, as one of them knows it.

    Args:
        ranks: Global ranks of the set.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._issued: dict[str, Issued] = {}
        self._flags = [0] * len(ranks)
        self._last_joined = -1
        self._stuck_rounds = 0

    @property
    def is_over(self) -> bool:
        """No rank issues anything more."""
        return all(flags & SHUT_DOWN for flags in self._flags)

    def hear(self, said: Sequence[Said]) -> dict[str, Issued]:
        """What the ranks have said in a round.

        Returns:
            The names that every rank has issued now, in the same order on all ranks.
        """
        touched: dict[str, None] = {}
        for index, message in enumerate(said):
            if message.flags & JOINED and not self._flags[index] & JOINED:
                self._last_joined = index
                # What waited for that rank alone.
                touched.update(dict.fromkeys(self._issued))
            self._flags[index] = message.flags
            for name, meta in message.issued.items():
                self._issued.setdefault(name, {})[index] = meta
                touched[name] = None
        ready = [name for name in touched if not self._missing(name)]
        return {name: self._issued.pop(name) for name in ready}

    def refusal(self, name: str, meta: Meta, issued: Issued) -> MismatchError | None:
        """Why the ranks cannot carry something out that all have issued; None if they can."""
        if len(set(issued.values())) > 1:
            parts = [f"rank {self._ranks[index]}: {issued[index].describe()}" for index in sorted(issued)]
            return MismatchError(f"{name!r} is not the same on all ranks: {'; '.join(parts)}")
        joined = [rank for rank, flags in zip(self._ranks, self._flags, strict=True) if flags & JOINED]
        if joined and not (meta.kind == "barrier" or meta.op in (AVERAGE, SUM)):
            return MismatchError(
                f"{name!r} needs something of rank {joined}, which has joined: only sums and averages go on"
            )
        return None

    def end_joins(self) -> int | None:
        """The rank that joined last, once all have, which begins anew; else None."""
        if not all(flags & JOINED for flags in self._flags):
            return None
        self._flags = [flags & ~JOINED for flags in self._flags]
        return self._ranks[self._last_joined]

    def look_for_stalls(self, said: Sequence[Said], *, agreed: bool) -> None:
        """Raises StallError for what can never come; in the same round on every rank."""
        for name in self._issued:
            if ended := [index for index in self._missing(name) if self._flags[index] & SHUT_DOWN]:
                raise StallError(self._stalled(name, ended, "has ended without it"))
        is_stuck = self._issued and not agreed and all(message.flags & (WAITING | JOINED) for message in said)
        self._stuck_rounds = self._stuck_rounds + 1 if is_stuck else 0
        if self._stuck_rounds > DEADLOCK_ROUNDS:
            raise StallError("; ".join(self._stalled(name, self._missing(name), "has not") for name in self._issued))

    def _missing(self, name: str) -> list[int]:
        issued = self._issued[name]
        return [index for index, flags in enumerate(self._flags) if index not in issued and not flags & JOINED]

    def _stalled(self, name: str, missing: Sequence[int], what: str) -> str:
        having = [self._ranks[index] for index in sorted(self._issued[name])]
        return f"{name!r} was issued by rank {having}, but rank {[self._ranks[index] for index in missing]} {what}"
