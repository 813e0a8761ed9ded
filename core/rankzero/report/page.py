"""The report as one HTML file that needs no network: the facts as JSON, and the code that draws them."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from importlib import resources
from typing import Any

REPORT_FILE = "report.html"
"""Its name in a run directory."""

_NOTHING_ELSE = "base-uri 'none'; form-action 'none'"


def render(runs: list[dict[str, Any]]) -> str:
    """The page of one run, or of several side by side.

    Args:
        runs: Of each what `rankzero.report.facts.collect` gives.

    Returns:
        HTML. A log line or a metric's name can be no code in it: it travels as JSON, the page shows it as text, and
        the browser is told to run nothing but the script with this one's checksum.
    """
    title = runs[0]["id"] if len(runs) == 1 else f"{len(runs)} runs"
    return _page(title, {"runs": runs})


def render_list(store: str, runs: list[dict[str, Any]], page: int = 1, pages: int = 1, search: str = "") -> str:
    """The page of a store: its runs, each with a link to its report.

    Args:
        store: Where they are.
        runs: Of each ``id``, ``name``, ``state``, ``world``, ``created``, ``started``, ``ended`` and the ``last``
            metrics.
        page: Number of this page, from 1.
        pages: Number of all pages.
        search: The text by which the runs were chosen.
    """
    return _page(store, {"store": store, "list": runs, "page": page, "pages": pages, "search": search})


def _page(title: str, facts: dict[str, Any]) -> str:
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": _escaped(title),
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; {_NOTHING_ELSE}",
        "STYLE": _part("page.css"),
        "SCRIPT": script,
        "DATA": _inside_script(json.dumps(plain(facts), separators=(",", ":"), allow_nan=False)),
    }
    # Pieces of the template alone are replaced: what the facts hold may look like one.
    head, *rest = _part("page.html").split("{{")
    pieces = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        pieces += [parts[name], text]
    return "".join(pieces)


@functools.cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def plain(value: Any) -> Any:
    """Returns a value with ``nan`` and ``inf`` as text, since a browser's JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _inside_script(data: str) -> str:
    """JSON that ends no ``<script>`` element, whatever is in it."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
