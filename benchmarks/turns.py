"""Sides of a comparison that take turns in the same ranks, since machines drift from minute to minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Turns = dict[str, list[float]]
"""Seconds of a step in each turn, by side."""


def take_turns(sides: Mapping[str, Callable[[], object]], turns: int, steps: int) -> Turns:
    """Runs ``steps`` steps of each side, ``turns`` times, the sides one after the other in an order that changes.

    Called in every rank. The first turn of each is not counted.
    """
    import rankzero.train as rt

    names = list(sides)
    taken: Turns = {name: [] for name in names}
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            rt.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            if turn:
                taken[name].append((time.perf_counter() - started) / steps)
    return taken


def ratios(taken: Turns, one: str, other: str) -> list[float]:
    """Of the seconds of two sides, turn by turn."""
    return [mine / theirs for mine, theirs in zip(taken[one], taken[other], strict=True)]
