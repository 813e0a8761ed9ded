"""The report of a run: the facts that it shows, as JSON, and one HTML file that draws them and needs no network.

The facts are collected from the run directory, thinned out, without secrets.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import pkgutil
import re
import time
from collections.abc import Mapping
from typing import Any

from rankzero.errors import RunNotFoundError
from rankzero.job import Job
from rankzero.report.cost import usage
from rankzero.report.summary import Summary
from rankzero.run.handle import RunHandle
from rankzero.run.reports import TOTALS, is_number
from rankzero.run.status import RunStatus

LOG_CHARACTERS = 2_000_000
"""Of the lines of all ranks together that a report holds; of each rank the last ones."""

LINE_CHARACTERS = 2_000
"""A longer line is cut."""

LOGGED_RANKS = 256
"""Ranks whose lines a report holds, the rank that failed and the lowest ones: a file has to be opened for each."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences of terminals, such as colors, which a page does not draw."""

_HIDDEN = {"files", "queue_time", "engine", "owner", "labels", "prices", "identity", "identity_parts", "created"}
_HIDDEN |= {"format", "generation", "nonce", "submission", "first_attempt", "earlier"}
_NO_RUN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def collect(handle: RunHandle[Any]) -> dict[str, Any]:
    """Returns everything that the page shows of one run, as JSON. Reads neither values nor the data of checkpoints.

    Raises:
        RunNotFoundError: no run lives there, or what lies there was not written by rankzero.
    """
    try:
        job, status = handle.job, handle.status()
        summary = Summary()
        summary.read(handle, status)
        return {
            "id": handle.id,
            "directory": handle.directory,
            "name": job.name,
            "state": status.state,
            "shown": status.shown,
            "error": status.error,
            "created": job.created,
            "started": status.started,
            "ended": status.ended,
            "now": time.time(),
            "world": job.world,
            "attempt": status.attempt,
            "labels": job.labels,
            "identity": job.identity,
            "engine_url": status.engine_url if not status.final else None,
            "result": status.result,
            "used": used_of(job, status),
            "last": {name: value for name, value in status.metrics.items() if is_number(value) and name not in TOTALS},
            "config": _config(vars(job), status),
            **summary.facts(),
            "checkpoints": [
                {"id": one.id, "metrics": one.metrics, "size": sum(_size(part) for part in one.parts.values())}
                for one in handle.checkpoints()
            ],
            "logs": _logs(handle, job, status),
        }
    except _NO_RUN as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunNotFoundError(f"{handle.directory} cannot be read as a run of rankzero ({what})") from error


def used_of(job: Job, status: RunStatus) -> dict[str, str]:
    """Returns the usage and estimated cost of a run for display, ``{"GPU-hours": "3.20"}``; empty before its start."""
    found = usage(job, status, time.time())
    if found is None:
        return {}
    amount, unit = found.amount.split()
    return {f"{unit}ours": amount} | ({"estimated cost": found.price} if found.price else {})


def _config(job: Mapping[str, Any], status: RunStatus) -> dict[str, Any]:
    shown = {name: value for name, value in job.items() if name not in _HIDDEN and value not in (None, {}, [])}
    place = {"engine": job["engine"].get("kind"), "master": job["engine"].get("master")}
    driver = {"driver": f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else None}
    return {name: value for name, value in {**place, **shown, **driver}.items() if value is not None}


def _size(part: Mapping[str, Any]) -> int:
    size = part.get("size")
    return size if isinstance(size, int) else 0


def _logs(handle: RunHandle[Any], job: Job, status: RunStatus) -> list[dict[str, Any]]:
    """Returns the last lines of the ranks, with their times in seconds since the submission, None for unknown ones."""
    failed = (status.error or {}).get("rank")
    ranks = sorted(range(job.num_processes), key=lambda rank: rank != failed)[:LOGGED_RANKS]
    room = max(LINE_CHARACTERS, LOG_CHARACTERS // max(1, len(ranks)))
    return [
        {
            "rank": rank,
            "lines": [_ESCAPES.sub("", line.text)[:LINE_CHARACTERS] for line in lines],
            "times": [None if line.time is None else round(line.time - job.created, 1) for line in lines],
            "cut": is_cut,
        }
        for rank, (lines, is_cut) in sorted(handle.output.tails(ranks, room, status).items())
        if lines
    ]


_NOTHING_ELSE = "base-uri 'none'; form-action 'none'"


def render(runs: list[dict[str, Any]]) -> str:
    """The page of one run, or of several side by side.

    Args:
        runs: Of each what `rankzero.report.page.collect` gives.

    Returns:
        HTML. A log line or a metric's name can be no code in it: it travels as JSON, the page shows it as text, and
        the browser is told to run nothing but the script with this one's checksum.
    """
    title = runs[0]["id"] if len(runs) == 1 else f"{len(runs)} runs"
    return _page(title, {"runs": runs})


def render_list(location: str, runs: list[dict[str, Any]], left_out: int) -> str:
    """The page of a store: its newest runs, each with a link to its report.

    Args:
        location: The root of their directories.
        runs: Of each ``id``, ``name``, ``state``, ``world``, ``created``, ``started``, ``ended``, ``used`` and the
            ``last`` metrics.
        left_out: The number of older runs.
    """
    return _page(location, {"store": location, "list": runs, "older": left_out})


def _page(title: str, facts: dict[str, Any]) -> str:
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(title),
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
    data = pkgutil.get_data(__name__, name)
    assert data is not None
    return data.decode()


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
