"""Shows the card of a run in a notebook and renews it while the run lives. Jupyter is imported in a kernel only."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.run.directory import RunDirectory

if TYPE_CHECKING:
    from rankzero.report.progress import Followed

logger = logging.getLogger(__name__)


class Card:
    """Renders the card of a run repeatedly, and reads only new events each time."""

    def __init__(self, handle: Followed) -> None:
        # Every run imports this module, and few of them in a notebook.
        from rankzero.report.progress import Progress

        self._handle = handle
        self._progress = Progress(handle)

    def html(self) -> str:
        """Returns the card of this moment. Raises OSError or RankZeroError if the run cannot be read."""
        from rankzero.report import card, cost

        job, status, now = RunDirectory(self._handle.directory).job(), self._handle.status(), time.time()
        self._progress.read(status)
        facts = card.Facts(
            id=self._handle.id,
            name=job.name,
            world=str(status.world_size or job.world),
            directory=self._handle.directory,
            status=status,
            now=now,
            rows=self._progress.rows,
            unit=self._progress.unit,
            total=self._progress.total,
            ranks=self._progress.ranks,
            seconds_left=self._progress.seconds_left,
            used=str(cost.usage(job, status, now) or ""),
        )
        return card.render(facts)


@contextlib.contextmanager
def showing() -> Iterator[Callable[[Followed], None]]:
    """Yields a function that shows a run's card and keeps it up to date; outside of notebooks it does nothing.

    The last update follows the block, so this block is entered before the one that owns the run.
    """
    cards: list[_Live] = []
    try:
        yield lambda handle: cards.append(_Live(handle)) if in_notebook() else None
    finally:
        for one in cards:
            one.end()


class _Live:
    """A card on a page, with the thread that updates it."""

    def __init__(self, handle: Followed) -> None:
        from IPython.display import HTML, display

        self._card = Card(handle)
        # The thread draws it: a store that does not answer now must not end a run that has begun.
        self._place = display(HTML(""), display_id=True)
        self._ended = threading.Event()
        self._pace = max(bounds.POLL_INTERVAL_LONGEST, handle.pace)
        self._thread = threading.Thread(target=self._refresh, name="rankzero-card", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(bounds.REPORT_TIMEOUT())

    def _refresh(self) -> None:
        has_ended = False
        while not has_ended:
            _update(self._place, self._card)
            has_ended = self._ended.wait(self._pace)
        _update(self._place, self._card)


def _update(place: Any, made: Card) -> None:
    from IPython.display import HTML

    try:
        place.update(HTML(made.html()))
    except Exception:
        # A card that cannot be drawn must not fail a training.
        logger.warning("the card of the run could not be drawn", exc_info=True)


def in_notebook() -> bool:
    """Returns True in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return getattr(found, "kernel", None) is not None
