"""`HangWatch`: distinguishes a run that hangs from a slow one."""

from __future__ import annotations

import re
from collections.abc import Set

from rankzero import bounds
from rankzero.channel.messages import Stack
from rankzero.driver import policy
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
        silent: Ranks that have returned and whose heartbeats had stopped at the last call of `is_hung`.
        has_reported: True once `notice` was called.
    """

    def __init__(self, num_processes: int) -> None:
        """Creates a watch that has not received anything yet.

        Args:
            num_processes: Number of ranks.
        """
        self._ranks = frozenset(range(num_processes))
        self._progress: dict[int, tuple[int, float]] = {}
        self._returned: set[int] = set()
        self._beats: dict[int, float] = {}
        self.silent: list[int] = []
        self.stacks: dict[int, Stack] = {}
        self._before: dict[int, Stack] = {}
        self._looked_at = 0.0
        self._waiting_since: float | None = None
        self.has_reported = False

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
        self._progress[rank] = -1, now
        self._beats[rank] = now

    @property
    def progress_at(self) -> float:
        """Monotonic time of the last progress or return of any rank."""
        return max((when for _, when in self._progress.values()), default=0.0)

    @property
    def texts(self) -> dict[int, str]:
        """The stack of each rank as text, or why there is none."""
        without = {rank: "it had returned" if rank in self._returned else policy.NO_REPLY for rank in self._ranks}
        return dict(sorted((without | {rank: stack.text for rank, stack in self.stacks.items()}).items()))

    def is_hung(self, now: float, bound: float, over: Set[int]) -> bool:
        """Returns True if no rank has progressed or, once all have returned, one of them has sent no heartbeat.

        Args:
            now: Monotonic time.
            bound: Seconds after which that counts.
            over: Ranks that have sent their last report.
        """
        if not self._returned.issuperset(self._ranks):
            self.silent = []
            return now - self.progress_at > bound
        self.silent = [rank for rank in sorted(self._ranks - over) if now - self._beats[rank] > bound]
        return bool(self.silent)

    def must_look(self, now: float) -> bool:
        """Returns True if some ranks have returned without other progress, and stacks show what the others do."""
        remaining = self._ranks - self._returned
        if not self._returned or not remaining or now - self.progress_at < RETURNED_NOTICE():
            self._waiting_since, self._looked_at = None, 0.0
            self._before.clear()
            return False
        return now - self._looked_at >= RETURNED_NOTICE()

    def note_look(self, now: float) -> bool:
        """Judges the `stacks` that were requested because of `must_look`; returns False after progress meanwhile."""
        remaining = self._ranks - self._returned
        is_still = bool(remaining) and now - self.progress_at >= RETURNED_NOTICE()
        if not (is_still and all(self._waits(rank, now - self._looked_at) for rank in remaining)):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._before, self._looked_at = dict(self.stacks), now
        return is_still

    def waits_for_returned(self, now: float) -> bool:
        """Returns True if the remaining ranks have waited in collectives for `RETURNED_HANG` without progress."""
        since = self._waiting_since
        return since is not None and now - since >= RETURNED_HANG() - RETURNED_NOTICE()

    def _waits(self, rank: int, elapsed: float) -> bool:
        stack, before = self.stacks.get(rank), self._before.get(rank)
        if stack is None or not is_waiting(stack.text):
            return False
        if before is None:
            return True
        is_idle = stack.cpu is None or before.cpu is None or stack.cpu - before.cpu <= IDLE_SHARE * elapsed
        return is_idle and stack.text == before.text

    def notice(self, now: float) -> str:
        """Returns a message about what the ranks do that have not returned."""
        self.has_reported = True
        groups: dict[str, list[int]] = {}
        for rank in sorted(self._ranks - self._returned):
            stack = self.stacks.get(rank)
            groups.setdefault(describe(stack.text) if stack else "did not answer", []).append(rank)
        have = "has" if len(self._returned) == 1 else "have"
        places = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in groups.items())
        return (
            f"{name_ranks(sorted(self._returned))} {have} returned, without other progress for "
            f"{now - self.progress_at:.0f} s: {places}"
        )


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
    """Returns a few words about what a rank does, and the line of user code that called it."""
    frames = _frames(stack)
    if not frames:
        return "runs native code"
    verb = "waits" if is_waiting(stack) else "is"
    names = [name for path, _, name in frames if any(sign in path for sign in _WAITING) and "logger" not in path]
    what = (names or [frames[0][2]])[0]
    own = next((frame for frame in frames if not any(library in frame[0] for library in _LIBRARIES)), None)
    where = f", {own[0].rpartition('/')[2]}:{own[1]} in {own[2]}" if own else ""
    return f"{verb} in {what}{where}"


def _frames(stack: str) -> list[tuple[str, int, str]]:
    found = map(_FRAME.search, stack.splitlines())
    return [(frame["path"], int(frame["line"]), frame["function"]) for frame in found if frame]
