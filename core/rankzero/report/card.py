"""The card of a run, a small piece of HTML for notebooks: state, progress, curves, the first cause. No script, no link.

`showing` renews it while the run lives. Text that comes from a run is escaped, so it is never markup.
"""

from __future__ import annotations

import contextlib
import html
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rankzero import bounds
from rankzero.job import Job
from rankzero.report import curves
from rankzero.report.summary import Summary, usage
from rankzero.run.handle import RunHandle
from rankzero.run.status import RunStatus

MAX_CURVES = 6
ERROR = 4_000  # Last characters of an error that are shown
logger = logging.getLogger(__name__)


def draw(handle: RunHandle[Any], summary: Summary | None = None) -> str:
    """Returns the card of this moment; the summary has read earlier events. Raises OSError or RankZeroError."""
    status, summary = handle.status(), summary or Summary()
    summary.read(handle, status)
    return render(handle.job, handle.directory, status, summary, time.time())


@contextlib.contextmanager
def showing(handles: Sequence[RunHandle[Any]]) -> Iterator[None]:
    """Shows the card of the run that the block adds to ``handles`` in a notebook, and keeps it up to date."""
    from IPython.display import HTML, display

    place, ended, summary = display(HTML(""), display_id=True), threading.Event(), Summary()

    def refresh() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(bounds.POLL_INTERVAL_LONGEST)
            try:
                for handle in handles:
                    place.update(HTML(draw(handle, summary)))
            except Exception:
                # A card that cannot be drawn must not fail a training.
                logger.warning("the card of the run could not be drawn", exc_info=True)

    # A thread: a store that does not answer must not end a run that has begun.
    thread = threading.Thread(target=refresh, name="rankzero-card", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(bounds.REPORT_TIMEOUT())


def render(job: Job, directory: str, status: RunStatus, summary: Summary, now: float) -> str:
    """Returns the card as HTML: what is known as text, and a curve for each metric."""
    ranks, left, last = summary.ranks, summary.seconds_left, summary.last
    lines = [f"{job.name} on {status.world_size or job.world} ranks", directory, usage(job, status, now)]
    if status.started is not None:
        lines[0] += f", {duration((status.ended or now) - status.started)}"
    if ranks and not status.final:
        slow, fast = (choose(ranks, key=lambda rank: ranks[rank].done) for choose in (min, max))
        of = "" if summary.total is None else f" of {summary.total:g}"
        text = f"{ranks[slow].done:g} (rank {slow}) to {ranks[fast].done:g} (rank {fast}){of} {summary.unit}"
        lines.append(text if left is None else f"{text}, {duration(left)} left")
    lines += [f"{name} {last[name]}" for name in last][:MAX_CURVES]
    if status.error:
        text = str(status.error.get("message") or "")[-ERROR:]
        lines += ["", f"First cause: {status.error.get('type') or 'error'}", text]
    drawn = "".join(curves.svg(summary.rows, [name], 260, 90) or "" for name in [*last][:MAX_CURVES])
    text = html.escape("\n".join(filter(None, lines)))
    title = f"<b>{html.escape(job.run_id)}</b> is <b>{html.escape(status.shown)}</b>"
    return f'<div>{title}<pre style="white-space:pre-wrap">{text}</pre>{drawn}</div>'


def duration(seconds: float) -> str:
    """Returns seconds as ``12 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
