"""Draws a loss curve as a small SVG without a plotting library, so that a step need not load one."""

import base64
import html
from collections.abc import Mapping, Sequence

from rankzero.pipeline import encodable, height_of, is_number

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 12, 28, 30
_COLORS = ("#4f43dd", "#d9622b", "#13915c", "#b0226f")
_GRAY = "#8a8f98"


def draw(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> str | None:
    """Returns a chart of metrics over the reports of rank 0, as Markdown with an embedded picture.

    Args:
        rows: Reports, oldest first, with their number under ``"report"``.
        names: Metrics to draw, at most four.

    Returns:
        ``![loss](data:image/svg+xml;base64,...)``, a few kB; None if no metric has two finite values.
    """
    lines = {}
    for name in names[: len(_COLORS)]:
        points = [(int(str(row["report"])), row[name]) for row in rows if name in row]
        finite = [(x, float(y)) for x, y in points if is_number(y)]
        if len(finite) > 1:
            lines[name] = finite
    if not lines:
        return None
    svg = base64.b64encode(encodable(_svg(lines)).encode()).decode()
    # Brackets in a name would end the image's text.
    title = ", ".join(lines).replace("[", "(").replace("]", ")")
    return f"![{title}](data:image/svg+xml;base64,{svg})"


def _svg(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_low, x_span = min(xs), max(max(xs) - min(xs), 1)
    y_low, y_high = min(ys), max(ys)

    def place(x: int, y: float) -> str:
        across = _LEFT + (x - x_low) / x_span * (WIDTH - _LEFT - _RIGHT)
        down = _TOP + (1 - height_of(y, y_low, y_high)) * (HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    floor = HEIGHT - _BOTTOM
    text = f'font-family="sans-serif" font-size="11" fill="{_GRAY}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        f'<path d="M{_LEFT},{_TOP} V{floor} H{WIDTH - _RIGHT}" fill="none" stroke="{_GRAY}"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end" {text}>{y_high:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end" {text}>{y_low:.4g}</text>',
        f'<text x="{_LEFT}" y="{HEIGHT - 10}" {text}>report {x_low}</text>',
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 10}" text-anchor="end" {text}>{max(xs)}</text>',
    ]
    across = _LEFT
    for color, (name, points) in zip(_COLORS, lines.items(), strict=False):
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{across}" y="16" {text.replace(_GRAY, color)}>{html.escape(name)}</text>')
        across += 14 + 7 * len(name)
    return "\n".join([*parts, "</svg>"])
