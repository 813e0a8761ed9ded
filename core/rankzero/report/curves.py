"""Curves of what rank 0 reported, as SVG for notebooks and pages and as text for logs, and a table of its reports.

Pure functions of the rows that `rankzero.run.reports.rows_of` returns. They load no plotting library, so tasks of an
orchestrator can use them. The page of the report is interactive and draws by itself in the browser.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankzero.run.reports import UNSHOWN, is_number
from rankzero.texts import encodable

Row = Mapping[str, Any]
Points = Sequence[tuple[float, float]]

TEXT_WIDTH = 40
TABLE_COLUMNS = 8
SPARKLINE_POINTS = 120
CHART_POINTS = 200

_BARS = "▁▂▃▄▅▆▇█"
_BLUE, _GRAY = "#2563c9", "#8a8f98"
_COLORS = ("#4f43dd", "#d9622b", "#13915c", "#b0226f")


def sparkline(rows: Sequence[Row], name: str, width: int = 180, height: int = 44) -> str | None:
    """Returns a metric's curve as an SVG without axes; None if it has no two different finite values."""
    points = _points(rows, name, SPARKLINE_POINTS)
    if len({y for _, y in points}) < 2:
        return None
    (line,) = _polylines({_BLUE: points}, 3, 3, width - 6, height - 6)
    return f'<svg width="{width}" height="{height}" role="img">{line}</svg>'


def chart(rows: Sequence[Row], names: Sequence[str], width: int = 560, height: int = 220) -> str | None:
    """Returns a chart of metrics over the reports of rank 0, as Markdown that contains the SVG.

    Args:
        rows: Reports, oldest first.
        names: Metrics to draw. Those after the fourth are left out.
        width: Width of the picture in pixels.
        height: Height of the picture in pixels.

    Returns:
        ``![loss](data:image/svg+xml;base64,...)``, a few kB; None if no metric has two finite values.
    """
    drawn = {name: _points(rows, name, CHART_POINTS) for name in names[: len(_COLORS)]}
    drawn = {name: points for name, points in drawn.items() if len(points) > 1}
    if not drawn:
        return None
    lines = dict(zip(_COLORS, drawn.values(), strict=False))
    (first, last), (low, high) = _edges(lines)
    left, top, right, bottom = 80, 28, width - 12, height - 30
    text = f'font-family="sans-serif" font-size="11" fill="{_GRAY}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="{_GRAY}"/>',
        f'<text x="{left - 6}" y="{top + 4}" text-anchor="end" {text}>{high:.4g}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end" {text}>{low:.4g}</text>',
        f'<text x="{left}" y="{height - 10}" {text}>report {first:g}</text>',
        f'<text x="{right}" y="{height - 10}" text-anchor="end" {text}>{last:g}</text>',
        *_polylines(lines, left, top, right - left, bottom - top),
    ]
    across = left
    for color, name in zip(_COLORS, drawn, strict=False):
        parts.append(f'<text x="{across}" y="16" {text.replace(_GRAY, color)}>{html.escape(name)}</text>')
        across += 14 + 7 * len(name)
    svg = base64.b64encode(encodable("\n".join([*parts, "</svg>"])).encode()).decode()
    # Brackets in a name would end the image's text.
    title = ", ".join(drawn).replace("[", "(").replace("]", ")")
    return f"![{title}](data:image/svg+xml;base64,{svg})"


def _edges(lines: Mapping[str, Points]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the lowest and highest x, and the lowest and highest y."""
    xs, ys = zip(*(point for points in lines.values() for point in points), strict=True)
    return (min(xs), max(xs)), (min(ys), max(ys))


def _polylines(lines: Mapping[str, Points], left: float, top: float, width: float, height: float) -> Iterator[str]:
    """Yields the elements that draw curves, by their colors, in a rectangle."""
    x_edges, y_edges = _edges(lines)
    for color, points in lines.items():
        places = " ".join(
            f"{left + width * height_of(x, *x_edges):.1f},{top + height * (1 - height_of(y, *y_edges)):.1f}"
            for x, y in points
        )
        yield f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def text(rows: Sequence[Row], name: str) -> str | None:
    """Returns a metric's curve in one line of text; None if it has no two finite values.

    Example:
        >>> text([{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}], "loss")
        '█▅▁ 3 → 1'
    """
    values = [y for _, y in _points(rows, name, TEXT_WIDTH)]
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    bars = "".join(_BARS[round(height_of(value, low, high) * (len(_BARS) - 1))] for value in values)
    return f"{bars} {values[0]:.4g} → {values[-1]:.4g}"


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the rows as aligned lines of text below the names of the first `TABLE_COLUMNS` columns."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in UNSHOWN))[:TABLE_COLUMNS]
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def evenly(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Returns at most ``limit`` (2 or more) of the rows, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]


def loss_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the metrics that are losses, in the order in which ranks first reported them."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if "loss" in name.lower()]


def height_of(value: float, low: float, high: float) -> float:
    """Returns the position of a value between the lowest and the highest of a curve: 0.0 to 1.0.

    Example:
        >>> height_of(0.0, -1.7e308, 1.7e308)
        0.5
    """
    # The difference of two floats may be no float; the difference of their halves always is.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0


def _points(rows: Sequence[Row], name: str, limit: int) -> Points:
    """Returns at most so many finite values of a metric, each behind the number of its report."""
    finite = [
        {"x": row.get("report", index), "y": row[name]} for index, row in enumerate(rows) if is_number(row.get(name))
    ]
    return [(float(point["x"]), float(point["y"])) for point in evenly(finite, limit)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
