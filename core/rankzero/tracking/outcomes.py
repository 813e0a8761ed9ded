"""`Outcomes`: attempts as they begin and end, from events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended.

    Attributes:
        number: From 0.
        began: Unix time at which its start was tried.
        started: Unix time at which every rank had started; None if they never had.
        ended: Unix time of its end.
        cause: ``"succeeded"``, ``"cancelled"``, ``"failed"``, or for one that another followed why: ``"lost"``,
            ``"hang"``, ``"killed"`` and the like.
        what: In words, if it failed.
    """

    number: int
    began: float
    started: float | None
    ended: float
    cause: str
    what: str = ""

    @property
    def seconds(self) -> float:
        """For which its ranks held their places."""
        return 0.0 if self.started is None else self.ended - self.started


class Outcomes:
    """Finds the attempts among the events of one driver."""

    def __init__(self) -> None:
        self._number = 0
        self._began: float | None = None
        self._started: float | None = None
        self._what = ""

    def of(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Attempt]:
        """The attempts that have ended in the next events."""
        for event in events:
            kind, now = event["type"], event["time"]
            if kind == "failure" and not self._what:
                self._what = str(event.get("what", ""))
            elif kind == "restart":
                yield from self._end(now, str(event.get("cause") or "failed"), str(event.get("what", "")))
            elif kind == "state" and event["state"] == "starting":
                self._number, self._began, self._started, self._what = event["attempt"], now, None, ""
            elif kind == "state" and event["state"] == "running":
                self._started = now
            elif kind == "state":
                yield from self._end(now, event["state"], self._what if event["state"] == "failed" else "")

    def _end(self, now: float, cause: str, what: str) -> Iterator[Attempt]:
        if self._began is not None:
            yield Attempt(self._number, self._began, self._started, now, cause, what)
        self._began = self._started = None
