"""The card of a run, a small piece of HTML for notebooks: state, progress, curves, the first cause. No script, no link.

Pure functions. Text that comes from a run is escaped, so it is never markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankzero.report import curves
from rankzero.report.progress import COUNTED, RankProgress
from rankzero.run.reports import is_number
from rankzero.run.status import RunStatus

MAX_CURVES = 6
MAX_RANKS = 8
"""Ranks up to which each is shown; of more, only the slowest and the fastest are named."""

ERROR_LINES = 15
"""First lines of an error that are shown; as many of its last lines are shown, too."""

_COLORS = {"succeeded": "#1a7f4b", "failed": "#c0322b", "cancelled": "#a76a00", "running": "#2563c9"}
_OTHER = "#6b7280"
_SOFT = "opacity:.7"


@dataclass(frozen=True)
class Facts:
    """The facts that a card shows.

    Attributes:
        id: The name of the run.
        name: The display name of the function or script.
        world: The number of ranks as display text.
        directory: The run directory.
        status: The state of the run.
        now: The current Unix time.
        rows: The reports of rank 0, as `rankzero.run.reports.rows_of` returns them.
        unit: The unit in which ``ranks`` count.
        total: The number of units of the whole training, or None.
        ranks: The progress of each rank.
        seconds_left: Seconds until the end, or None.
        used: Display text of the hours and the cost of the run; may be empty.
    """

    id: str
    name: str
    world: str
    directory: str
    status: RunStatus
    now: float
    rows: Sequence[Mapping[str, Any]] = ()
    unit: str = "reports"
    total: float | None = None
    ranks: Mapping[int, RankProgress] = field(default_factory=dict)
    seconds_left: float | None = None
    used: str = ""


def render(facts: Facts) -> str:
    """Returns the card as HTML."""
    state = facts.status.state
    badge = f"color:#fff;background:{_COLORS.get(state, _OTHER)};border-radius:999px;padding:1px 10px;font-size:12px"
    head = f'<b>{_text(facts.id)}</b> <span style="{badge}">{_text(facts.status.shown)}</span>'
    what = f"{facts.name} on {facts.world} ranks"
    parts = [
        f'<div style="display:flex;gap:10px;align-items:center;flex-wrap:wrap">{head}'
        f'<span style="{_SOFT}">{_text(what)}</span></div>',
        _progress(facts),
        _line(" · ".join(_facts_of(facts))),
        _curves(facts.rows),
        _error(facts.status.error),
        _line(facts.directory, mono=True),
    ]
    style = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px;max-width:820px"
    return f'<div style="{style};font-size:13px;line-height:1.5">{"".join(parts)}</div>'


def duration(seconds: float) -> str:
    """Returns seconds as ``12 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def describe_ranks(ranks: Mapping[int, RankProgress]) -> str:
    """Returns the progress of each rank as ``0: 12, 1: 11``; of many ranks only the slowest and the fastest."""
    if len(ranks) <= MAX_RANKS:
        return ", ".join(f"{rank}: {found.done:g}" for rank, found in ranks.items())
    slowest = min(ranks, key=lambda rank: ranks[rank].done)
    fastest = max(ranks, key=lambda rank: ranks[rank].done)
    return f"{ranks[slowest].done:g} (rank {slowest}) to {ranks[fastest].done:g} (rank {fastest})"


def _facts_of(facts: Facts) -> list[str]:
    status = facts.status
    said = []
    if status.started is not None:
        said.append(duration((status.ended or facts.now) - status.started))
    if status.attempt:
        said.append(f"attempt {status.attempt}")
    if found := next(iter(facts.ranks.values()), None):
        said += [f"{found.rate:.4g} {facts.unit} a second"] if found.rate else []
    if len(facts.ranks) > 1 and not status.final:
        said.append(f"{facts.unit} by rank {describe_ranks(facts.ranks)}")
    if facts.used:
        said.append(facts.used)
    return said


def _progress(facts: Facts) -> str:
    """Returns a progress bar if the reports name a total, else an empty text."""
    if not facts.total or not facts.ranks or facts.status.final:
        return ""
    done = min(found.done for found in facts.ranks.values())
    share = 100 * min(1.0, max(0.0, done / facts.total))
    left = "" if facts.seconds_left is None else f", {duration(facts.seconds_left)} left"
    outer = "background:rgba(128,128,128,.25);border-radius:4px;height:8px;margin:8px 0 4px"
    inner = f"background:#2563c9;border-radius:4px;height:8px;width:{share:.1f}%"
    bar = f'<div style="{outer}"><div style="{inner}"></div></div>'
    return bar + _line(f"{done:g} of {facts.total:g} {facts.unit}{left}")


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in COUNTED]
    drawn = [curve for curve in (_curve(rows, name) for name in names) if curve][:MAX_CURVES]
    return f'<div style="display:flex;flex-wrap:wrap;gap:6px 18px;margin:6px 0">{"".join(drawn)}</div>' if drawn else ""


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    values = [row[name] for row in rows if is_number(row.get(name))]
    if not values:
        return None
    label = f'<div style="min-width:80px"><b>{_text(name)}</b> <span style="{_SOFT}">{values[-1]:.5g}</span></div>'
    return f"<div>{label}{curves.sparkline(rows, name) or ''}</div>"


def _error(error: Mapping[str, Any] | None) -> str:
    if not error:
        return ""
    lines = str(error.get("message") or "").splitlines()
    if len(lines) > 2 * ERROR_LINES:
        lines = [*lines[:ERROR_LINES], "...", *lines[-ERROR_LINES:]]
    style = "border-left:4px solid #c0322b;padding-left:10px;margin:6px 0"
    pre = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;font-size:12px;background:none"
    title = _text(f"First cause: {error.get('type') or 'error'}")
    return f'<div style="{style}"><b>{title}</b><pre style="{pre}">{_text(chr(10).join(lines))}</pre></div>'


def _line(text: str, *, mono: bool = False) -> str:
    font = ";font-family:monospace;font-size:12px;overflow-wrap:anywhere" if mono else ""
    return f'<div style="{_SOFT}{font}">{_text(text)}</div>' if text else ""


def _text(text: str) -> str:
    return html.escape(text, quote=True)
