"""`Agreement`: what the ranks of a set have issued. Every rank hears the same, and so decides the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rankzero.compat.horovod.torch.errors import MismatchError, StallError
from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.messages import Meta, Report

DEADLOCK_ROUNDS = 2000
"""Rounds in which every rank waits, and for nothing that all have issued, before that is an error: some seconds."""

JOINED, SHUT_DOWN, WAITING = 1, 2, 4
"""Flags that a rank sends: it has joined, it issues nothing more, it waits for a result."""

NAMED = 5
"""Operations that a message names, of those that it is about."""

Issued = dict[int, Meta]
"""What each rank issued under one name, by index of the rank."""


class Agreement:
    """Of one set of ranks, as one of them knows it.

    Args:
        ranks: Global ranks of the set.
        timeout: Seconds after which what some rank has not issued is an error.
        warn_after: Seconds after which it is a warning, and again.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, warn_after: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._warn_after = warn_after
        self._warn_at = 0.0
        self._first_issued: dict[str, float] = {}
        self._issued: dict[str, Issued] = {}
        self._flags = [0] * len(ranks)
        self._last_joined = -1
        self._stuck_rounds = 0

    @property
    def is_over(self) -> bool:
        """No rank issues anything more."""
        return all(flags & SHUT_DOWN for flags in self._flags)

    def receive(self, reports: Sequence[Report]) -> dict[str, Issued]:
        """What the ranks have sent in a round.

        Returns:
            The names that every rank has issued now, in the same order on all ranks.
        """
        now = time.monotonic()
        touched: dict[str, None] = {}
        for index, message in enumerate(reports):
            if message.flags & JOINED and not self._flags[index] & JOINED:
                self._last_joined = index
                # What waited for that rank alone.
                touched.update(dict.fromkeys(self._issued))
            self._flags[index] = message.flags
            for name, meta in message.issued.items():
                self._issued.setdefault(name, {})[index] = meta
                self._first_issued.setdefault(name, now)
                touched[name] = None
        ready = [name for name in touched if not self._missing(name)]
        for name in ready:
            del self._first_issued[name]
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

    def look_for_stalls(self, reports: Sequence[Report], *, agreed: bool) -> str | None:
        """Looks for what does not come.

        Returns:
            A warning of what has not come for long, now and then.

        Raises:
            StallError: it can never come, seen in the same round by every rank; or it has not for too long.
        """
        for name in self._issued:
            if ended := [index for index in self._missing(name) if self._flags[index] & SHUT_DOWN]:
                raise StallError(self._stalled(name, ended, "has ended without it"))
        self._look_for_lost_joins()
        is_stuck = self._issued and not agreed and all(message.flags & (WAITING | JOINED) for message in reports)
        self._stuck_rounds = self._stuck_rounds + 1 if is_stuck else 0
        if self._stuck_rounds > DEADLOCK_ROUNDS:
            raise StallError(self._all_stalled(list(self._issued)))
        return self._look_at_the_time() if self._first_issued else None

    def _look_for_lost_joins(self) -> None:
        joined = [index for index, flags in enumerate(self._flags) if flags & JOINED]
        ended = [index for index, flags in enumerate(self._flags) if flags & SHUT_DOWN and not flags & JOINED]
        if joined and ended:
            raise StallError(f"rank {self._named(joined)} waits in join(), but rank {self._named(ended)} has ended")

    def _look_at_the_time(self) -> str | None:
        now = time.monotonic()
        if late := [name for name, since in self._first_issued.items() if now - since > self._timeout]:
            raise StallError(f"for {self._timeout:.0f} s {self._all_stalled(late)}")
        late = [name for name, since in self._first_issued.items() if now - since > self._warn_after]
        if not late or now < self._warn_at:
            return None
        self._warn_at = now + self._warn_after
        return f"for {now - self._first_issued[late[0]]:.0f} s {self._all_stalled(late)}"

    def _missing(self, name: str) -> list[int]:
        issued = self._issued[name]
        return [index for index, flags in enumerate(self._flags) if index not in issued and not flags & JOINED]

    def _all_stalled(self, names: Sequence[str]) -> str:
        more = f"; and {len(names) - NAMED} others" if len(names) > NAMED else ""
        return "; ".join(self._stalled(name, self._missing(name), "has not") for name in names[:NAMED]) + more

    def _stalled(self, name: str, missing: Sequence[int], what: str) -> str:
        having = self._named(sorted(self._issued[name]))
        return f"{name!r} was issued by rank {having}, but rank {self._named(missing)} {what}"

    def _named(self, indices: Sequence[int]) -> list[int]:
        return [self._ranks[index] for index in indices]


def listed(names: Sequence[str]) -> str:
    """Names for a message, some of many."""
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more
