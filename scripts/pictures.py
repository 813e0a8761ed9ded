"""Draws docs/images/run.svg, for light and dark pages.

``python scripts/pictures.py`` writes it. A test compares the file with what this script draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "images"


@dataclass(frozen=True)
class Picture:
    """Boxes, and arrows between them.

    Attributes:
        size: Width and height in pixels.
        boxes: Left, top, width and height, title, and text of each box.
        arrows: Start, end, label, and the label's middle.
    """

    size: tuple[int, int]
    boxes: list[tuple[int, int, int, int, str, str]]
    arrows: list[tuple[tuple[int, int], tuple[int, int], str, tuple[int, int]]]


PICTURES = {
    "run": Picture(
        (870, 350),
        [
            (10, 20, 240, 60, "Airflow task, Dagster asset", "or Python: run(train, ...)"),
            (330, 20, 270, 60, "run directory", "job, status, logs, checkpoints, result"),
            (680, 20, 180, 60, "next step", "value or ResultRef"),
            (330, 150, 270, 60, "driver", "supervises, restarts, records"),
            (330, 280, 270, 60, "agents", "tasks of one barrier Spark stage"),
            (680, 280, 180, 60, "ranks", "your function or script"),
        ],
        [
            ((250, 50), (330, 50), "submit", (290, 42)),
            ((600, 50), (680, 50), "result", (640, 42)),
            ((450, 150), (450, 80), "status, events", (400, 120)),
            ((480, 80), (480, 150), "job", (497, 120)),
            ((465, 210), (465, 280), "authenticated channel", (536, 250)),
            ((600, 310), (680, 310), "start, watch", (640, 302)),
            ((770, 280), (600, 66), "values, checkpoints", (760, 180)),
        ],
    ),
}

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2933; text-anchor: middle }
.title { font-weight: 600; font-size: 15px } .label { font-size: 12px; fill: #52606d }
rect { fill: #f5f7fa; stroke: #4b5bb5; stroke-width: 1.5 } line, path { stroke: #52606d; stroke-width: 1.5 }
path { fill: #52606d }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .label { fill: #9aa5b1 } rect { fill: #1f2933; stroke: #8d9bf0 }
  line, path { stroke: #9aa5b1 } path { fill: #9aa5b1 }
}
"""


def drawn(picture: Picture) -> str:
    """Returns a picture as SVG."""
    parts = []
    for (x1, y1), (x2, y2), label, (x, y) in picture.arrows:
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#tip)"/>')
        parts += [f'<text class="label" x="{x}" y="{y}">{label}</text>'] if label else []
    for left, top, width, height, title, text in picture.boxes:
        middle, center = left + width / 2, top + height / 2
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>')
        parts.append(f'<text class="title" x="{middle:g}" y="{center - 4:g}">{title}</text>')
        parts.append(f'<text x="{middle:g}" y="{center + 16:g}">{text}</text>')
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    defs = f'<defs>{tip}<path d="M0 0L8 4L0 8z"/></marker></defs>'
    width, height = picture.size
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>{STYLE}</style>\n{defs}\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawn(picture))
