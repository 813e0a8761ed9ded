"""A run in a notebook: its card, which changes while the run lives. Jupyter is imported in a kernel only."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankzero.run import card, cost
from rankzero.run.directory import RunDirectory
from rankzero.run.progress import Followed, Progress

logger = logging.getLogger(__name__)

REFRESH_INTERVAL = 1.0
"""Seconds between two states of a card."""

LAST_TIMEOUT = 10.0
"""Seconds for the last state of a card, after the end of its run."""


class Card:
    """Makes the card of a run, again and again; reads only what is new."""

    def __init__(self, handle: Followed) -> None:
        self._handle = handle
        self._progress = Progress(handle)

    def html(self) -> str:
        """The card now. Raises OSError or RankZeroError if the run cannot be read."""
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
    """Gives a function that shows a run's card from then on, its last state after the block; nothing elsewhere.

    Around the block that owns the run: the last state is there when that has ended.
    """
    cards: list[_Live] = []
    try:
        yield lambda handle: cards.append(_Live(handle)) if in_notebook() else None
    finally:
        for one in cards:
            one.end()


class _Live:
    """A card on a page, and the thread that renews it."""

    def __init__(self, handle: Followed) -> None:
        from IPython.display import HTML, display

        self._card = Card(handle)
        # Drawn by the thread: a store that does not answer now is no reason to end a run that has begun.
        self._place = display(HTML(""), display_id=True)
        self._ended = threading.Event()
        self._pace = max(REFRESH_INTERVAL, handle.pace)
        self._thread = threading.Thread(target=self._refresh, name="rankzero-card", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(LAST_TIMEOUT)

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
        # A card is not worth a training.
        logger.warning("the card of the run could not be made", exc_info=True)


def in_notebook() -> bool:
    """True in the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return getattr(found, "kernel", None) is not None
