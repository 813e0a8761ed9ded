"""The progress lines at the bottom of a terminal while a run trains: its ranks' progress, rate and time left."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.report.card import describe_ranks, duration
from rankzero.report.progress import Progress
from rankzero.run.printing import print_line
from rankzero.run.status import RunStatus

if TYPE_CHECKING:
    from rich.text import Text

    from rankzero.run.handle import RunHandle

_SHOWN_METRICS = 5


@contextlib.contextmanager
def shown(handle: RunHandle[Any]) -> Iterator[Callable[[str], None]]:
    """Shows the progress of a run at the bottom of a terminal, and nothing in a pipe.

    Args:
        handle: The run.

    Yields:
        A function that prints a line of a rank above the progress.
    """
    show = functools.partial(print_line, run_id=handle.id)
    if not sys.stderr.isatty():
        yield show
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    foot = _Foot(handle)
    # Lines to a file or a pipe are printed unchanged.
    to_terminal = sys.stdout.isatty()
    with Live(
        get_renderable=foot.render,
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        try:
            yield lambda line: console.print(Text.from_ansi(line), soft_wrap=True) if to_terminal else show(line)
        finally:
            foot.stop()


class _Foot:
    def __init__(self, handle: RunHandle[Any]) -> None:
        self._handle = handle
        self._progress = Progress(handle)
        self._lines = ["pending"]
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="rankzero-progress", daemon=True)
        self._thread.start()

    def render(self) -> Text:
        """Returns the current progress lines, each cut at the width of the terminal."""
        from rich.text import Text

        lines = [f"{self._lines[0]}  {duration(round(time.monotonic() - self._began))}", *self._lines[1:]]
        return Text("\n".join(lines), style="cyan", no_wrap=True, overflow="ellipsis")

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(2 * bounds.POLL_INTERVAL_LONG)

    def _poll(self) -> None:
        while not self._ended.wait(max(bounds.POLL_INTERVAL_LONG, self._handle.pace)):
            # An error while progress is read must not stop the training.
            with contextlib.suppress(Exception):
                status = self._handle.status()
                self._progress.read(status)
                self._lines = describe(status, self._progress)


def describe(status: RunStatus, progress: Progress) -> list[str]:
    """Returns at most two lines: the run with the last metrics of rank 0, and its ranks.

    Args:
        status: Status of the run.
        progress: Progress of its ranks.
    """
    facts = [status.shown]
    if status.attempt:
        facts.append(f"attempt {status.attempt}")
    ranks, slowest = progress.ranks, progress.slowest
    if slowest is not None:
        found = ranks[slowest]
        of = "" if progress.total is None else f"/{progress.total:g}"
        facts.append(f"{found.done:g}{of} {progress.unit}")
        facts += [f"{found.rate:.3g}/s"] if found.rate else []
        facts += [f"{duration(round(progress.seconds_left))} left"] if progress.seconds_left is not None else []
    metrics = [f"{name} {value:.4g}" for name, value in progress.last.items() if type(value) in (int, float)]
    lines = ["  ".join([*facts, *metrics[:_SHOWN_METRICS]])]
    return [*lines, f"ranks  {describe_ranks(ranks)}"] if len(ranks) > 1 else lines
