"""`HangWatch` distinguishes a run that hangs from a slow one, `RemainingWatch` ranks that wait for returned peers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Set

from rankzero import bounds
from rankzero.channel.messages import Dump, Message, Peek, Position
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
    """Tracks the last progress of every rank, and requests their stacks before it reports a hang."""

    def __init__(
        self,
        num_processes: int,
        broadcast: Callable[[Message], None],
        disconnected: Callable[[], Collection[object]],
    ) -> None:
        """Creates a watch that has not seen any rank yet.

        Args:
            num_processes: Number of ranks.
            broadcast: Sends a message to all agents: a request for stacks, which arrive through `on_stack`.
            disconnected: Returns the agents that may connect again. The heartbeats of their ranks are delayed, and so
                no run counts as hung while there are any.
        """
        self._ranks = range(num_processes)
        self._broadcast = broadcast
        self._disconnected = disconnected
        self._progress: dict[int, tuple[int, float]] = {}
        self._returned: set[int] = set()
        self._beats: dict[int, float] = {}
        self.silent: list[int] = []
        """Ranks that have returned and whose heartbeats had stopped at the last poll."""
        self._began: float | None = None
        self._stacks: dict[int, str] = {}
        self._stacks_deadline: float | None = None

    def on_beat(self, rank: int, progress: int, now: float) -> None:
        """Records a rank's progress counter. One of a rank that has returned shows only that it is alive."""
        if rank in self._returned:
            self._beats[rank] = now
            return
        if rank not in self._progress or self._progress[rank][0] != progress:
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

    def on_stack(self, rank: int, text: str) -> None:
        """Records the stack that a rank sent."""
        self._stacks[rank] = text

    def poll(self, now: float, bound: float, over: Set[int] = frozenset()) -> dict[int, str] | None:
        """Returns the stack of each rank if the run hangs; None if it does not, or if stacks are still missing.

        The caller polls this from when every rank has started; progress counts from the first call.

        Args:
            now: Monotonic time.
            bound: Seconds after which a run hangs: without progress of any rank or, once all ranks have returned,
                without a heartbeat of one.
            over: Ranks that have sent their last report.
        """
        if self._began is None:
            self._began = now
        for rank in self._ranks:
            # A rank without any heartbeat may hang, too. It has `MEET_TIMEOUT` more, to reach rank 0.
            self._progress.setdefault(rank, (-1, self._began + bounds.MEET_TIMEOUT()))
        if self._returned.issuperset(self._ranks):
            silent = [rank for rank in self._ranks if rank not in over and now - self._beats[rank] > bound]
            is_hung = bool(silent)
        else:
            silent, is_hung = [], policy.is_hung((when for _, when in self._progress.values()), now, bound)
        self.silent = silent
        if not is_hung or self._disconnected():
            self._stacks_deadline = None
        elif self._stacks_deadline is None:
            self._stacks.clear()
            self._stacks_deadline = now + bounds.STACKS_WINDOW()
            self._broadcast(Dump())
        elif now > self._stacks_deadline or len(self._stacks) == len(self._ranks):
            return {rank: self._stacks.get(rank, policy.NO_REPLY) for rank in self._ranks}
        return None


class RemainingWatch:
    """Watches the ranks that remain when others have returned.

    A rank may compute alone, such as rank 0 when it evaluates or saves a model: that is no hang, however long it
    takes. A rank counts as waiting only if its innermost call is a collective and its process uses no processor time.
    """

    def __init__(self, num_processes: int, broadcast: Callable[[Message], None]) -> None:
        """Creates a watch that has not polled any rank yet.

        Args:
            num_processes: Number of ranks.
            broadcast: Sends a message to all agents: a request for positions, which arrive through `note`.
        """
        self._ranks = frozenset(range(num_processes))
        self._broadcast = broadcast
        self._positions: dict[int, Position] = {}
        self._before: dict[int, Position] = {}
        self._peeked_at: float | None = None
        self._before_at = 0.0
        self._is_open = False
        self._has_reported = False
        self._waiting_since: float | None = None

    def note(self, rank: int, position: Position) -> None:
        """Records the position that a rank sent."""
        self._positions[rank] = position

    def poll(self, now: float, returned: Set[int], progress_at: float) -> str | None:
        """Returns a message, once, if some ranks have returned and the others make no progress; else None.

        Args:
            now: Monotonic time.
            returned: The ranks that have returned.
            progress_at: Monotonic time of the last progress or return of any rank.
        """
        remaining = self._ranks - returned
        if not returned or not remaining or now - progress_at < RETURNED_NOTICE():
            self._peeked_at = self._waiting_since = None
            self._is_open = False
            self._before.clear()
            return None
        if self._peeked_at is None or (not self._is_open and now - self._peeked_at >= RETURNED_NOTICE()):
            self._before, self._before_at = dict(self._positions) if self._peeked_at else {}, self._peeked_at or now
            self._positions.clear()
            self._peeked_at, self._is_open = now, True
            self._broadcast(Peek())
        elif self._is_open and (remaining <= set(self._positions) or now - self._peeked_at > bounds.STACKS_WINDOW()):
            self._is_open = False
            self._judge(now, remaining)
            if not self._has_reported:
                self._has_reported = True
                return self._notice(returned, remaining, now - progress_at)
        return None

    def is_hung(self, now: float) -> bool:
        """True if the remaining ranks have waited in collectives for `RETURNED_HANG`, since the last progress."""
        since = self._waiting_since
        return since is not None and now - since >= RETURNED_HANG() - RETURNED_NOTICE()

    def _judge(self, now: float, remaining: frozenset[int]) -> None:
        elapsed = (self._peeked_at or now) - self._before_at
        if not all(self._waits(rank, elapsed) for rank in remaining):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def _waits(self, rank: int, elapsed: float) -> bool:
        position, before = self._positions.get(rank), self._before.get(rank)
        if position is None or not is_waiting(position.stack):
            return False
        if before is None:
            return True
        if position.cpu is not None and before.cpu is not None:
            return position.cpu - before.cpu <= IDLE_SHARE * elapsed and position.stack == before.stack
        return position.stack == before.stack

    def _notice(self, returned: Set[int], remaining: frozenset[int], seconds: float) -> str:
        groups: dict[str, list[int]] = {}
        for rank in sorted(remaining):
            position = self._positions.get(rank)
            groups.setdefault(describe(position.stack) if position else "did not answer", []).append(rank)
        have = "has" if len(returned) == 1 else "have"
        places = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in groups.items())
        return f"{name_ranks(sorted(returned))} {have} returned, without other progress for {seconds:.0f} s: {places}"


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
