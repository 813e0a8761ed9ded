"""`Notify`: tells people that a run stands still, is restarted, has failed."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rankzero.errors import InvalidJobError
from rankzero.tracking.tracker import Tracker

if TYPE_CHECKING:
    from rankzero.run.directory import RunStatus
    from rankzero.run.handle import RunHandle

Kind = Literal["no-progress", "restart", "failed", "cancelled", "succeeded"]

KINDS: tuple[Kind, ...] = ("no-progress", "restart", "failed", "cancelled", "succeeded")

POST_TIMEOUT = 5.0
"""Seconds for a webhook to answer: half of what a tracker has at the end of a run."""

_PROGRESS = ("entered", "metric", "checkpoint", "restart", "returned")
_MOST_PENDING = 100
_LINE = 500
"""Characters of a reason."""


@dataclass(frozen=True)
class Notice:
    """What has happened.

    Attributes:
        kind: ``"no-progress"``, ``"restart"``, ``"failed"``, ``"cancelled"`` or ``"succeeded"``.
        run_id: The run's name.
        directory: Its directory, for `rankzero.RunHandle.attach`.
        reason: In one line: the first cause, or for how long nothing was heard. Empty for a success.
        labels: The run's.
    """

    kind: str
    run_id: str
    directory: str
    reason: str
    labels: dict[str, str]

    @property
    def text(self) -> str:
        """All of it, for people."""
        what = {"no-progress": "makes no progress", "restart": "is restarted"}.get(self.kind, self.kind)
        return f"run {self.run_id} {what}{self.reason and f': {self.reason}'} ({self.directory})"


class Notify(Tracker):
    """Calls a function of yours, or a webhook, when a run stands still, is restarted or has failed.

    A notice that could not be delivered is tried again while the run lives.

    Args:
        to: A function that is called with each `Notice`, in the process that drives the run; or a webhook's address,
            to which ``{"text": ...}`` is posted, as Slack, Mattermost and Teams take it.
        on: What is told: some of ``"no-progress"``, ``"restart"``, ``"failed"``, ``"cancelled"``, ``"succeeded"``.
        no_progress: Seconds without a report or checkpoint of any rank after which a run counts as standing still, once
            for each standstill; also before its first report, such as while it waits for a cluster. None: never. It
            only tells; `Launcher.hang_timeout` ends an attempt.

    Example:
        >>> from rankzero import Launcher
        >>> from rankzero.tracking import Notify
        >>> launcher = Launcher(2, trackers=[Notify("https://hooks.example/T1/B2", no_progress=1800)])
    """

    def __init__(
        self,
        to: str | Callable[[Notice], object],
        *,
        on: Sequence[Kind] = ("no-progress", "restart", "failed"),
        no_progress: float | None = None,
    ) -> None:
        unknown = [kind for kind in on if kind not in KINDS]
        if isinstance(on, str) or unknown:
            raise InvalidJobError(f"on is {on!r}; give some of {', '.join(KINDS)}")
        if not callable(to) and not (isinstance(to, str) and to.startswith(("http://", "https://"))):
            raise InvalidJobError(f"to is {to!r}; give a function, or the address of a webhook")
        if no_progress is not None and not no_progress > 0:
            raise InvalidJobError(f"no_progress is {no_progress!r}; it must be a positive number of seconds")
        self.to = to
        self.on = tuple(on)
        self.no_progress = no_progress
        self._pending: list[Notice] = []
        self._heard: float | None = None
        self._has_told = False
        self._waits_for = ""

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Notices restarts and standstills; sends what could not be sent before."""
        for event in events:
            if event["type"] == "waiting":
                self._waits_for = str(event.get("what", ""))
            elif event["type"] in _PROGRESS:
                self._heard, self._has_told, self._waits_for = time.monotonic(), False, ""
            if event["type"] == "restart":
                self._note(run, "restart", str(event.get("what", "")))
        self._look_at_silence(run, time.monotonic())
        self._send()

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Notices how the run has ended."""
        if status.final:
            self._note(run, status.state, str((status.error or {}).get("message", "")))
        self._send()

    def _look_at_silence(self, run: RunHandle[Any], now: float) -> None:
        self._heard = now if self._heard is None else self._heard
        silence = now - self._heard
        if self.no_progress is not None and silence > self.no_progress and not self._has_told:
            self._has_told = True
            what = f"nothing was reported for {silence:.0f} s"
            self._note(run, "no-progress", f"{what}; {self._waits_for}" if self._waits_for else what)

    def _note(self, run: RunHandle[Any], kind: str, reason: str) -> None:
        if kind in self.on and len(self._pending) < _MOST_PENDING:
            lines = reason.splitlines() or [""]
            self._pending.append(Notice(kind, run.id, run.directory, lines[0][:_LINE], run.labels))

    def _send(self) -> None:
        """Raises what the function or the webhook raises; what was not sent waits for the next time."""
        while self._pending:
            notice = self._pending[0]
            if isinstance(self.to, str):
                _post(self.to, {"text": notice.text})
            else:
                self.to(notice)
            self._pending.pop(0)


def _post(address: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=POST_TIMEOUT):
        pass
