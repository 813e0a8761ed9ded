"""Draws pictures of docs/images, for light and dark pages: run.svg, and concept-*.svg, one for each concept.

``python scripts/pictures.py`` writes them. A test compares the files with what this script draws.
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
    "concept-run": Picture(
        (760, 170),
        [
            (10, 20, 190, 55, "task, step, script", "starts it, and may die"),
            (285, 55, 190, 55, "run directory", "the only record"),
            (10, 105, 190, 55, "driver and ranks", "train, and write it"),
            (560, 20, 190, 55, "next try", "attaches by the name"),
            (560, 105, 190, 55, "you", "status, logs, cancel, result"),
        ],
        [
            ((200, 47), (285, 72), "submit", (243, 48)),
            ((200, 132), (285, 98), "write", (243, 132)),
            ((560, 47), (475, 72), "find", (517, 48)),
            ((560, 132), (475, 98), "read", (517, 132)),
        ],
    ),
    "concept-attempt": Picture(
        (760, 190),
        [
            (10, 15, 470, 50, "try 1 of a task or step", "the orchestrator's count"),
            (560, 15, 190, 50, "try 2", "after the host was lost"),
            (10, 110, 190, 60, "attempt 0", "submission 0"),
            (290, 110, 190, 60, "attempt 1", "submission 0"),
            (560, 110, 190, 60, "attempt 2", "submission 1"),
        ],
        [
            ((200, 140), (290, 140), "a rank died", (245, 132)),
            ((480, 140), (560, 140), "", (520, 132)),
            ((105, 65), (105, 110), "", (105, 90)),
            ((655, 65), (655, 110), "", (655, 90)),
        ],
    ),
    "concept-identity": Picture(
        (760, 200),
        [
            (10, 10, 190, 50, "code", "function and its modules"),
            (10, 75, 190, 50, "arguments", "values, datasets"),
            (10, 140, 190, 50, "world size", "num_processes"),
            (285, 70, 190, 60, "identity", "a digest of contents"),
            (560, 30, 190, 60, "the same", "attach, resume, deliver"),
            (560, 115, 190, 60, "another", "from scratch"),
        ],
        [
            ((200, 35), (285, 85), "", (240, 50)),
            ((200, 100), (285, 100), "", (240, 90)),
            ((200, 165), (285, 115), "", (240, 150)),
            ((475, 90), (560, 62), "", (517, 70)),
            ((475, 110), (560, 143), "", (517, 140)),
        ],
    ),
    "concept-checkpoint": Picture(
        (760, 170),
        [
            (10, 15, 160, 55, "rank 0", "report(checkpoint=...)"),
            (10, 100, 160, 55, "rank 1", "report(checkpoint=...)"),
            (255, 15, 190, 55, "part of rank 0", "file and checksum"),
            (255, 100, 190, 55, "part of rank 1", "file and checksum"),
            (530, 15, 220, 55, "manifest", "written last: now it counts"),
            (530, 100, 220, 55, "next attempt", "get_checkpoint()"),
        ],
        [
            ((170, 42), (255, 42), "write", (212, 34)),
            ((170, 127), (255, 127), "write", (212, 119)),
            ((445, 42), (530, 36), "", (487, 34)),
            ((445, 120), (530, 56), "", (480, 80)),
            ((640, 70), (640, 100), "", (640, 90)),
        ],
    ),
    "concept-result": Picture(
        (760, 170),
        [
            (10, 15, 160, 55, "rank 0", "returns a value"),
            (255, 15, 190, 55, "file in result/", "and its digest"),
            (530, 15, 220, 55, "status: succeeded", "once every rank is done"),
            (255, 100, 190, 55, "ResultRef", "XCom, asset, argument"),
            (530, 100, 220, 55, "next step", "load() verifies the digest"),
        ],
        [
            ((170, 42), (255, 42), "write", (212, 34)),
            ((445, 42), (530, 42), "record", (487, 34)),
            ((350, 70), (350, 100), "", (350, 90)),
            ((445, 127), (530, 127), "deliver", (487, 119)),
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
