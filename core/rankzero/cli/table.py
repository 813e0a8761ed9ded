"""Prints the runs of a store as a table: two lines for each run in a terminal, one tab-separated line in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rankzero.cli import words
from rankzero.report import cost
from rankzero.report.card import duration
from rankzero.run.listing import Listed

if TYPE_CHECKING:
    from rich.console import RenderableType

COLORS = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "blue", "starting": "cyan"}

_HEADS = ("run", "state", "ranks", "submitted", "took", "used", "metrics")
_METRICS = 4
_LINES_OF_RUN = 2
_LINES_AROUND = 3
"""Lines of the header, the note about runs that are not shown, and the prompt."""


def plain(found: Sequence[Listed]) -> list[str]:
    """Returns a header and a line for each run, with columns separated by tabs."""
    lines = [_HEADS]
    for one in found:
        submitted = words.moment(one.job.created) or ""
        state, ranks = one.status.state, one.job.world
        lines.append((one.job.run_id, state, ranks, submitted, _took(one), " ".join(_used(one)), _metrics(one)))
    return ["\t".join(line) for line in lines]


def show(find: Callable[[], Sequence[Listed]], interval: float | None) -> None:
    """Prints the table once, or every ``interval`` seconds until interrupted."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if interval is None:
        console.print(_table(find()))
        return
    # Only the newest runs fit into the terminal.
    most = max(1, (console.height - _LINES_AROUND) // _LINES_OF_RUN)
    with Live(_table(find(), most), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(_table(find(), most), refresh=True)
        except KeyboardInterrupt:
            pass


def _table(found: Sequence[Listed], most: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = found if most is None else found[-most:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    for head in ("state", "ranks", "submitted", "used"):
        table.add_column(head, no_wrap=True)
    for one in shown:
        # Text does not interpret a run's name as markup.
        metrics = Text(_metrics(one), style="dim", no_wrap=True, overflow="ellipsis")
        state = Text(one.status.state, style=COLORS.get(one.status.state, ""))
        when = Text((words.moment(one.job.created) or "")[5:16])
        when.append(f"\n{_took(one)}", style="dim")
        table.add_row(Group(Text(one.job.run_id), metrics), state, one.job.world, when, Text("\n".join(_used(one))))
    left_out = len(found) - len(shown)
    return Group(f"{left_out} older runs are not shown", table) if left_out else table


def _took(one: Listed) -> str:
    status = one.status
    if status.started is None:
        return ""
    return duration(round(max(0.0, (status.ended or time.time()) - status.started), 1))


def _used(one: Listed) -> tuple[Any, ...]:
    """Returns the hours that a run has used, and their price if it is known."""
    found = cost.usage(one.job, one.status, time.time())
    return () if found is None else (found.amount, *([found.price] if found.price else []))


def _metrics(one: Listed) -> str:
    numbers = {name: value for name, value in one.status.metrics.items() if type(value) in (int, float)}
    shown = [f"{name}={value:.4g}" for name, value in numbers.items() if not name.startswith("total_")]
    return " ".join(shown[:_METRICS])
