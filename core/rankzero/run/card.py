"""A run as a small piece of HTML, as notebooks show it: state, progress, curves, the first cause. No script, no link.

Pure. Whatever comes from a run is escaped: it is text there, never markup.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankzero.run.directory import RunStatus
from rankzero.run.progress import COUNTED, RankProgress
from rankzero.run.reports import evenly, is_number

MAX_CURVES = 6
MAX_RANKS = 8
"""Ranks that are shown one by one; of more the first and the last are named."""

ERROR_LINES = 15
"""First lines of an error that are shown, and as many of the last."""

_POINTS = 120
_WIDTH, _HEIGHT, _EDGE = 180, 44, 3
_COLORS = {"succeeded": "#1a7f4b", "failed": "#c0322b", "cancelled": "#a76a00", "running": "#2563c9"}
_OTHER = "#6b7280"
_SOFT = "opacity:.7"


@dataclass(frozen=True)
class Facts:
    """What a card shows.

    Attributes:
        id: The run's name.
        name: What is trained.
        world: Its ranks, for people.
        directory: The run directory.
        status: Its state.
        now: Unix time.
        rows: The reports of rank 0, as `rankzero.run.reports.rows_of` has them.
        unit: What ``ranks`` count.
        total: How many of them there are in all, or None.
        ranks: How far each rank is.
        seconds_left: Until the end, or None.
        used: What the run has used and cost, for people; may be empty.
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
    """The card as HTML."""
    state = facts.status.state
    badge = f"color:#fff;background:{_COLORS.get(state, _OTHER)};border-radius:999px;padding:1px 10px;font-size:12px"
    head = f'<b>{_text(facts.id)}</b> <span style="{badge}">{_text(state)}</span>'
    what = f"{facts.name} on {facts.world} ranks"
    parts = [
        f'<div style="display:flex;gap:10px;align-items:center;flex-wrap:wrap">{head}'
        f'<span style="{_SOFT}">{_text(what)}</span></div>',
        _progress(facts),
        _line(" · ".join(_said(facts))),
        _curves(facts.rows),
        _error(facts.status.error),
        _line(facts.directory, mono=True),
    ]
    style = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px;max-width:820px"
    return f'<div style="{style};font-size:13px;line-height:1.5">{"".join(parts)}</div>'


def duration(seconds: float) -> str:
    """Seconds as ``12 s``, ``3 min 5 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def describe_ranks(ranks: Mapping[int, RankProgress]) -> str:
    """How far each rank is, for people: ``0: 12, 1: 11``; of many the slowest and the fastest alone."""
    if len(ranks) <= MAX_RANKS:
        return ", ".join(f"{rank}: {found.done:g}" for rank, found in ranks.items())
    slowest = min(ranks, key=lambda rank: ranks[rank].done)
    fastest = max(ranks, key=lambda rank: ranks[rank].done)
    return f"{ranks[slowest].done:g} (rank {slowest}) to {ranks[fastest].done:g} (rank {fastest})"


def _said(facts: Facts) -> list[str]:
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
    """A bar, where reports name a total."""
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
    finite = [dict(row) for row in rows if is_number(row.get(name))]
    if not finite:
        return None
    values = [float(row[name]) for row in evenly(finite, _POINTS)]
    label = f'<div style="min-width:80px"><b>{_text(name)}</b> <span style="{_SOFT}">{values[-1]:.5g}</span></div>'
    low, high = min(values), max(values)
    span = high - low
    if len(values) < 2 or not 0 < span < math.inf:
        return f"<div>{label}</div>"
    wide, tall = _WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE
    points = " ".join(
        f"{_EDGE + wide * index / (len(values) - 1):.1f},{_EDGE + tall * (high - value) / span:.1f}"
        for index, value in enumerate(values)
    )
    line = f'<polyline points="{points}" fill="none" stroke="#2563c9" stroke-width="1.6" stroke-linejoin="round"/>'
    return f'<div>{label}<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{line}</svg></div>'


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
