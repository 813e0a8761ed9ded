"""What the ranks run while faults are injected: every number depends on every step, and it stops where it is told.

A training arrives at a *moment*, says so in a file that holds its process ids, and waits for the file ``go``.
Only the first attempt stops; an attempt after it runs through.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

PRIME = 1_000_003
STEPS = 4
HOLD_AT = 2  # The step at which the moments ``training`` and ``checkpoint`` are

LOOK = 0.01


def fold(value: int, step: int, rank: int) -> int:
    """One rank's share of a step."""
    return (value * (rank + 2) + step) % PRIME


def expected(steps: int, ranks: int) -> int:
    """What a training of so many steps returns, however often it was interrupted."""
    value = 1
    for step in range(steps):
        value = sum(fold(value, step, rank) for rank in range(ranks)) % PRIME
    return value


def note(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    writing = path.with_name(f".{path.name}-{os.getpid()}")
    writing.write_text(text)
    writing.replace(path)


def arrive(folder: str, moment: str, go: str = "go") -> None:
    """Says that this process has arrived, and waits to be let go by the file ``go``."""
    note(Path(folder, f"at-{moment}"), json.dumps({"pid": os.getpid(), "agent": os.getppid()}))
    while not Path(folder, go).exists():
        time.sleep(LOOK)


class Held:
    """A value whose pickling arrives at a moment; it comes back as 0."""

    def __init__(self, folder: str, moment: str) -> None:
        self.folder, self.moment = folder, moment

    def __reduce__(self) -> tuple[Any, ...]:
        arrive(self.folder, self.moment)
        return int, ()


class HeldByReader:
    """A value whose loading arrives at a moment, until the file ``loaded``; it comes back as the folder."""

    def __init__(self, folder: str, moment: str) -> None:
        self.folder, self.moment = folder, moment

    def __reduce__(self) -> tuple[Any, ...]:
        return opened, (self.folder, self.moment)


def opened(folder: str, moment: str) -> str:
    """Called where a `HeldByReader` is loaded; its rank does that, too, to see that it can be."""
    if "RANK" in os.environ:
        return folder
    arrive(folder, moment, go="loaded")
    return folder


def train(
    folder: str,
    moment: str = "",
    who: int = 0,
    steps: int = STEPS,
    hold_value: bool = False,
    stays: bool = False,
) -> dict[str, Any]:
    """Trains ``steps`` steps with a checkpoint after each.

    Args:
        folder: Where files are exchanged with the test.
        moment: Where the first attempt stops; empty for nowhere.
        who: The rank that stops.
        steps: How many.
        hold_value: The value stops whoever loads it, at the moment ``delivery``.
        stays: The rank that stops at the moment ``checkpoint`` does not go on once that is reported.

    Returns:
        ``value``, and ``history``: the attempts that took part, with the first step of each.
    """
    import torch
    import torch.distributed as dist

    import rankzero.train as rt

    context = rt.get_context()

    def holds(where: str) -> bool:
        return where == moment and context.attempt == 0 and context.rank == who

    if holds("rendezvous"):
        arrive(folder, moment)
    dist.init_process_group("gloo")
    checkpoint = rt.get_checkpoint()
    state: dict[str, Any] = checkpoint.load() if checkpoint else {"step": -1, "value": 1, "history": []}
    state["history"].append([context.attempt, state["step"] + 1])
    for step in range(state["step"] + 1, steps):
        if holds("training") and step == HOLD_AT:
            arrive(folder, moment)
        share = torch.tensor([fold(state["value"], step, context.rank)])
        dist.all_reduce(share)
        state = {**state, "step": step, "value": int(share.item()) % PRIME}
        held = {"held": Held(folder, moment)} if holds("checkpoint") and step == HOLD_AT else {}
        rt.report({"step": step}, checkpoint={**state, **held})
        if context.rank == 0:
            note(Path(folder, "reported"), str(step))
        if held and stays:
            arrive(folder, "reported-checkpoint", go="never")
    print("trained")
    if holds("half"):
        arrive(folder, moment)
    if holds("committed"):
        atexit.register(arrive, folder, moment)
    result = {"value": state["value"], "history": state["history"]}
    if holds("returned"):
        result["held"] = Held(folder, moment)
    if hold_value:
        result["held"] = HeldByReader(folder, "delivery")
    return result
