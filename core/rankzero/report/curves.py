"""Draws what rank 0 reported as an SVG, for notebooks and orchestrators: no script, and no plotting library.

Pure functions of the rows that `rankzero.run.reports.rows_of` returns. The report draws its own interactive charts.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rankzero.errors import encodable
from rankzero.run.reports import is_number

T = TypeVar("T")
Row = Mapping[str, Any]

CHART_POINTS = 200  # Most points of a drawn curve
COLORS = ("#4f43dd", "#d9622b", "#13915c", "#b0226f")
_GRAY = "#8a8f98"


def svg(rows: Sequence[Row], names: Sequence[str], width: int = 560, height: int = 220) -> str | None:
    """Returns an ``<svg>`` element of a few kB: metrics over the reports of rank 0, the ends of both axes, the names.

    A value that is not finite, such as ``nan``, is a gap of its curve. Metrics after the fourth are left out. Returns
    None if no metric has two finite values.
    """
    drawn = {name: points for name in names[: len(COLORS)] if (points := _points(rows, name))}
    if not drawn:
        return None
    places = [x for points in drawn.values() for x, _ in points]
    values = [y for points in drawn.values() for _, y in points if y is not None]
    first, last, low, high = min(places), max(places), min(values), max(values)
    # Halves, since the difference of two floats may be no float.
    wide, tall = last / 2 - first / 2 or 1.0, high / 2 - low / 2 or 1.0
    left, top, right, bottom = 64, 22, width - 8, height - 18
    text = f'font-family="sans-serif" font-size="11" fill="{_GRAY}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="{_GRAY}" stroke-opacity="0.5"/>',
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end" {text}>{high:.4g}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end" {text}>{low:.4g}</text>',
        f'<text x="{left}" y="{height - 4}" {text}>report {first:g}</text>',
        f'<text x="{right}" y="{height - 4}" text-anchor="end" {text}>{last:g}</text>',
    ]
    across = left
    for color, (name, points) in zip(COLORS, drawn.items(), strict=False):
        # The pen is lifted at each gap.
        path, is_down = "", False
        for x, y in points:
            if y is not None:
                at = left + (right - left) * ((x / 2 - first / 2) / wide)
                over = bottom - (bottom - top) * ((y / 2 - low / 2) / tall)
                path += f"L{at:.1f},{over:.1f}" if is_down else f"M{at:.1f},{over:.1f}h0"
            is_down = y is not None
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" stroke-linecap="round"/>')
        parts.append(f'<text x="{across}" y="14" {text.replace(_GRAY, color)}>{html.escape(name)}</text>')
        across += 14 + 7 * len(name)
    return "\n".join([*parts, "</svg>"])


def chart(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """Returns the picture of `svg` as Markdown, ``![curves](data:image/svg+xml;base64,...)``; None like `svg`."""
    picture = svg(rows, names)
    if picture is None:
        return None
    return f"![curves](data:image/svg+xml;base64,{base64.b64encode(encodable(picture).encode()).decode()})"


def evenly(rows: Sequence[T], limit: int) -> list[T]:
    """Returns at most ``limit`` (2 or more) of the rows, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]


def loss_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the metrics that are losses, in the order in which ranks first reported them."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if "loss" in name.lower()]


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float | None]]:
    """Returns a metric's values, each behind the number of its report; None for one that is not finite."""
    found = [
        (float(row.get("report", index)), float(row[name]) if is_number(row[name]) else None)
        for index, row in enumerate(rows)
        if isinstance(row.get(name), float) or is_number(row.get(name))
    ]
    return evenly(found, CHART_POINTS) if sum(y is not None for _, y in found) > 1 else []
