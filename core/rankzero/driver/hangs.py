"""`HangWatch`: distinguishes a run that hangs from a slow one."""

from __future__ import annotations

import re

from rankzero import bounds
from rankzero.channel.messages import Stack
from rankzero.driver import policy
from rankzero.driver.ending import Facts
from rankzero.driver.policy import name_ranks

RETURNED_NOTICE = bounds.scaled(30.0)  # Without progress, after some ranks have returned, until a line names the others
RETURNED_HANG = bounds.scaled(300.0)  # After which ranks that then wait in a collective hang, whatever hang_timeout is
IDLE_SHARE = 0.1  # Largest share of a core that a waiting rank uses, for its heartbeat and its threads

_FRAME = re.compile(r'File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/rankzero/", "/lib/python3")
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed", "/rankzero/compat/horovod/torch/")
_NOT_WAITING = "/torch/distributed/checkpoint/"


class HangWatch:
    """Distinguishes a run that hangs from a slow one, by the progress of each rank and, if needed, by their stacks.

    A rank may compute alone after others have returned, such as rank 0 when it evaluates or saves a model: that is no
    hang, however long it takes. A rank counts as waiting only if its innermost call is a collective and its process
    uses no processor time.

    Attributes:
        stacks: The replies of ranks to the last request for their stacks.
    """

    def __init__(self, facts: Facts) -> None:
        """Creates a watch that has not received anything yet. The reports of the ranks are in ``facts``."""
        self._facts, self._returned = facts, facts.returned
        self._ranks = frozenset(range(facts.num_processes))
        self._progress: dict[int, tuple[int, float]] = {}
        self._beats: dict[int, float] = {}
        self.stacks: dict[int, Stack] = {}
        self._before: dict[int, Stack] = {}
        self._looked_at = 0.0
        self._waiting_since: float | None = None
        self._has_reported = False

    def begin(self, now: float) -> None:
        """Starts the clocks, since every rank has started. A rank without heartbeats has some time to reach rank 0."""
        for rank in self._ranks:
            self._progress.setdefault(rank, (-1, now + bounds.MEET_TIMEOUT()))

    def on_beat(self, rank: int, progress: int, now: float) -> None:
        """Records a rank's progress counter. One of a rank that has returned shows only that it is alive."""
        if rank in self._returned:
            self._beats[rank] = now
        elif rank not in self._progress or self._progress[rank][0] != progress:
            self._progress[rank] = progress, now

    def on_return(self, rank: int, now: float) -> None:
        """Records that a rank's code has returned, its last progress. While it is alive, it may store its value."""
        self._returned.add(rank)
        self._progress[rank], self._beats[rank] = (-1, now), now

    @property
    def texts(self) -> dict[int, str]:
        """The stack of each rank as text, or why there is none."""
        without = {rank: "it had returned" if rank in self._returned else policy.NO_REPLY for rank in self._ranks}
        return dict(sorted((without | {rank: stack.text for rank, stack in self.stacks.items()}).items()))

    @property
    def _progress_at(self) -> float:
        return max((when for _, when in self._progress.values()), default=0.0)

    @property
    def _remaining(self) -> list[int]:
        return sorted(self._ranks - self._returned)

    def find(self, now: float, bound: float | None) -> tuple[str, list[int]] | None:
        """Returns why the run hangs, and for which ranks the others wait by their `stacks`; None if it does not hang.

        Args:
            now: Monotonic time.
            bound: Seconds without progress after which it hangs; None for the rule about returned ranks alone.
        """
        since, returned = self._waiting_since, name_ranks(list(self._returned))
        if since is not None and self._progress_at <= since <= now - RETURNED_HANG() + RETURNED_NOTICE():
            why = f"{name_ranks(self._remaining)} waited for {RETURNED_HANG():g} s in a collective that never ends"
            must = "a training must call every collective in every rank equally often"
            return f"{returned} returned, and {why} without {returned}: {must}", sorted(self._returned)
        if bound is None:
            return None
        if not self._remaining:
            silent = [rank for rank in sorted(self._ranks - self._facts.over) if now - self._beats[rank] > bound]
            why = f"{name_ranks(silent)} returned, and then sent no heartbeat for hang_timeout={bound} s"
            return (why, silent) if silent else None
        if now - self._progress_at <= bound:
            return None
        waiting = {rank for rank, stack in self.stacks.items() if is_waiting(stack.text)}
        return f"no rank made progress for hang_timeout={bound} s", sorted(self._ranks - waiting) if waiting else []

    def must_look(self, now: float) -> bool:
        """Returns True if some ranks have returned without other progress, and stacks show what the others do."""
        if not (self._returned and self._remaining) or now - self._progress_at < RETURNED_NOTICE():
            self._waiting_since, self._looked_at = None, 0.0
            self._before.clear()
            return False
        return now - self._looked_at >= RETURNED_NOTICE()

    def look(self, now: float) -> str | None:
        """Judges the `stacks` that were requested because of `must_look`.

        Returns:
            A line about what the ranks do that have not returned, the first time; else None.
        """
        remaining, still = self._remaining, now - self._progress_at
        is_still = bool(remaining) and still >= RETURNED_NOTICE()
        if not (is_still and all(self._waits(rank, now - self._looked_at) for rank in remaining)):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._before, self._looked_at = dict(self.stacks), now
        if not is_still or self._has_reported:
            return None
        self._has_reported = True
        groups: dict[str, list[int]] = {}
        for rank in remaining:
            stack = self.stacks.get(rank)
            groups.setdefault(describe(stack.text) if stack else "did not answer", []).append(rank)
        places = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in groups.items())
        return f"{name_ranks(list(self._returned))} returned, without other progress for {still:.0f} s: {places}"

    def _waits(self, rank: int, elapsed: float) -> bool:
        stack, before = self.stacks.get(rank), self._before.get(rank)
        if stack is None or not is_waiting(stack.text):
            return False
        if before is None:
            return True
        is_idle = stack.cpu is None or before.cpu is None or stack.cpu - before.cpu <= IDLE_SHARE * elapsed
        return is_idle and stack.text == before.text


def is_waiting(stack: str) -> bool:
    """Returns True if the innermost call of a stack waits for other ranks."""
    frames = _frames(stack)
    if not frames:
        return False
    path, _, function = frames[0]
    if function == "_engine_run_backward":
        return True
    return _NOT_WAITING not in path and any(sign in path for sign in _WAITING)


def describe(stack: str) -> str:
    """Returns whether a rank waits for others, and the line of user code at which it is."""
    own = next((frame for frame in _frames(stack) if not any(library in frame[0] for library in _LIBRARIES)), None)
    what = "waits in a collective" if is_waiting(stack) else "works"
    return f"{what}, {own[0].rpartition('/')[2]}:{own[1]} in {own[2]}" if own else what


def _frames(stack: str) -> list[tuple[str, int, str]]:
    found = map(_FRAME.search, stack.splitlines())
    return [(frame["path"], int(frame["line"]), frame["function"]) for frame in found if frame]
