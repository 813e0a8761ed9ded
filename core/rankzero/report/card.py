"""The card of a run, a small piece of HTML for notebooks: state, progress, curves, the first cause. No script, no link.

`showing` renews it while the run lives. Text that comes from a run is escaped, so it is never markup.
"""

from __future__ import annotations

import contextlib
import html
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankzero import bounds
from rankzero.job import Job
from rankzero.report import cost, curves
from rankzero.report.summary import COUNTED, Summary
from rankzero.run.handle import RunHandle
from rankzero.run.status import RunStatus

MAX_CURVES = 6
ERROR_LINES = 15
"""First lines of an error that are shown; as many of its last lines are shown, too."""

_COLORS = {"succeeded": "#1a7f4b", "failed": "#c0322b", "cancelled": "#a76a00", "running": "#2563c9"}
_SOFT = "opacity:.7"
_MONO = f"{_SOFT};font-family:monospace;font-size:12px;overflow-wrap:anywhere"

logger = logging.getLogger(__name__)


class Card:
    """Renders the card of a run repeatedly, and reads only new events each time."""

    def __init__(self, handle: RunHandle[Any]) -> None:
        self._handle = handle
        self._summary: Summary | None = None

    def html(self) -> str:
        """Returns the card of this moment. Raises OSError or RankZeroError if the run cannot be read."""
        job, status = self._handle.job, self._handle.status()
        summary = self._summary = self._summary or Summary()
        summary.read(self._handle, status)
        return render(job, self._handle.directory, status, summary, time.time())


@contextlib.contextmanager
def showing() -> Iterator[Callable[[RunHandle[Any]], None]]:
    """Yields a function that shows a run's card in a notebook and keeps it up to date, last behind the block."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def show(handle: RunHandle[Any]) -> None:
        from IPython.display import HTML, display

        place = display(HTML(""), display_id=True)
        # A thread draws it, also the first time: a store that does not answer must not end a run that has begun.
        thread = threading.Thread(target=_refresh, args=(place, handle, ended), name="rankzero-card", daemon=True)
        threads.append(thread)
        thread.start()

    try:
        yield show
    finally:
        ended.set()
        for thread in threads:
            thread.join(bounds.REPORT_TIMEOUT())


def _refresh(place: Any, handle: RunHandle[Any], ended: threading.Event) -> None:
    from IPython.display import HTML

    card, is_last, pause = Card(handle), False, 0.0
    while not is_last:
        is_last = ended.wait(pause)
        pause = max(bounds.POLL_INTERVAL_LONGEST, handle.pace)
        try:
            place.update(HTML(card.html()))
        except Exception:
            # A card that cannot be drawn must not fail a training.
            logger.warning("the card of the run could not be drawn", exc_info=True)


def render(job: Job, directory: str, status: RunStatus, summary: Summary, now: float) -> str:
    """Returns the card as HTML."""
    color = _COLORS.get(status.state, "#6b7280")
    badge = f"color:#fff;background:{color};border-radius:999px;padding:1px 10px;font-size:12px"
    names = [name for name in dict.fromkeys(name for row in summary.rows for name in row) if name not in COUNTED]
    shown = [name for name in names if name in summary.last][:MAX_CURVES]
    what = html.escape(f"{job.name} on {status.world_size or job.world} ranks")
    parts = [
        f'<b>{html.escape(job.run_id)}</b> <span style="{badge}">{html.escape(status.shown)}</span> '
        f'<span style="{_SOFT}">{what}</span>',
        "" if status.final else _progress(summary),
        _line(" · ".join(_facts_of(job, status, summary, now))),
        *(f'<div style="display:inline-block">{_metric(name, summary)}</div>' for name in shown),
        _error(status.error),
        _line(directory, _MONO),
    ]
    style = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px;max-width:860px"
    return f'<div style="{style};font-size:13px;line-height:1.5">{"".join(parts)}</div>'


def duration(seconds: float) -> str:
    """Returns seconds as ``12 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _facts_of(job: Job, status: RunStatus, summary: Summary, now: float) -> list[str]:
    ranks, said = summary.ranks, list[str]()
    if status.started is not None:
        said.append(duration((status.ended or now) - status.started))
    if status.attempt:
        said.append(f"attempt {status.attempt}")
    if (found := next(iter(ranks.values()), None)) and found.rate:
        said.append(f"{found.rate:.4g} {summary.unit} a second")
    if len(ranks) > 1 and not status.final:
        slow, fast = (choose(ranks, key=lambda rank: ranks[rank].done) for choose in (min, max))
        said.append(f"{ranks[slow].done:g} (rank {slow}) to {ranks[fast].done:g} (rank {fast}) {summary.unit}")
    if used := cost.usage(job, status, now):
        said.append(str(used))
    return said


def _progress(summary: Summary) -> str:
    """Returns a progress bar if the reports name a total, else an empty text."""
    slowest, left = summary.slowest, summary.seconds_left
    if not summary.total or slowest is None:
        return ""
    share = 100 * min(1.0, max(0.0, slowest.done / summary.total))
    bar = f'<div style="background:#2563c9;border-radius:4px;height:8px;width:{share:.1f}%"></div>'
    rest = "" if left is None else f", {duration(left)} left"
    outer = "background:rgba(128,128,128,.25);border-radius:4px;margin:8px 0 4px"
    return f'<div style="{outer}">{bar}</div>' + _line(f"{slowest.done:g} of {summary.total:g} {summary.unit}{rest}")


def _error(error: Mapping[str, Any] | None) -> str:
    if not error:
        return ""
    lines = str(error.get("message") or "").splitlines()
    if len(lines) > 2 * ERROR_LINES:
        lines = [*lines[:ERROR_LINES], "...", *lines[-ERROR_LINES:]]
    pre = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;font-size:12px;background:none"
    title, text = html.escape(f"First cause: {error.get('type') or 'error'}"), html.escape("\n".join(lines))
    outer = "border-left:4px solid #c0322b;padding-left:10px;margin:6px 0"
    return f'<div style="{outer}"><b>{title}</b><pre style="{pre}">{text}</pre></div>'


def _metric(name: str, summary: Summary) -> str:
    value = summary.last[name]
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    curve = curves.svg(summary.rows, [name], 260, 90) or ""
    return f"<b>{html.escape(name)}</b> {html.escape(text)}<br>{curve}"


def _line(text: str, style: str = _SOFT) -> str:
    return f'<div style="{style}">{html.escape(text)}</div>' if text else ""
