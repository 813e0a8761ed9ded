"""The report of a run: its facts as JSON, without secrets, and one HTML file that draws them and needs no network."""

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
from typing import Any

from rankzero import store
from rankzero.errors import RunNotFoundError
from rankzero.job import Job
from rankzero.report.summary import Summary, usage
from rankzero.run.directory import LINES
from rankzero.run.handle import RunHandle
from rankzero.run.lines import parsed, tails
from rankzero.run.reports import TOTALS, is_number
from rankzero.run.status import RunStatus

TAIL = 8 << 20  # Bytes of the last lines of all ranks that are read
LOG_CHARACTERS = 2_000_000  # Of the lines of all ranks together; of each rank the last ones are held
LINE_CHARACTERS = 2_000  # A longer line is cut
LOGGED_RANKS = 256  # The rank that failed and the lowest ones: a file has to be opened for each

# Headers of every response.
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
_HIDDEN = {"files", "queue_time", "owner", "labels", "prices", "identity", "identity_parts", "created"}
_HIDDEN |= {"format", "generation", "nonce", "submission", "first_attempt", "earlier"}
_STATUS = ("state", "shown", "error", "started", "ended", "attempt", "result")
_EMPTY: tuple[Any, ...] = (None, {}, [])
_NO_RUN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def run_of(location: str, name: str) -> RunHandle[Any]:
    """Returns the run of a store by its id, without following it. Raises RunNotFoundError; ValueError for no run id."""
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no run id")
    return RunHandle.attach(store.join(location, name), follows=False)


def collect(handle: RunHandle[Any]) -> dict[str, Any]:
    """Returns everything that the page shows of one run, as JSON. Reads neither values nor the data of checkpoints.

    Raises RunNotFoundError if no run lives there, or what lies there was not written by rankzero.
    """
    try:
        job, status, summary = handle.job, handle.status(), Summary()
        summary.read(handle, status)
        config = {**vars(job), "engine": job.engine.get("kind"), "master": job.engine.get("master")}
        config["driver"] = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else None
        return {
            "id": handle.id,
            "directory": handle.directory,
            "now": time.time(),
            **{name: getattr(job, name) for name in ("name", "created", "world", "labels", "identity")},
            **{name: getattr(status, name) for name in _STATUS},
            "engine_url": status.engine_url if not status.final else None,
            "used": usage(job, status, time.time()),
            "last": {name: value for name, value in status.metrics.items() if is_number(value) and name not in TOTALS},
            "config": {name: config[name] for name in config if name not in _HIDDEN and config[name] not in _EMPTY},
            **summary.facts(),
            "checkpoints": [
                {"id": one.id, "metrics": one.metrics, "size": sum(part["size"] for part in one.parts.values())}
                for one in handle.checkpoints()
            ],
            "logs": _logs(handle, job, status),
        }
    except _NO_RUN as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunNotFoundError(f"{handle.directory} cannot be read as a run of rankzero ({what})") from error


def _logs(handle: RunHandle[Any], job: Job, status: RunStatus) -> list[dict[str, Any]]:
    """Returns the last lines of the ranks, with their times in seconds since the submission, None for unknown ones."""
    failed = (status.error or {}).get("rank")
    ranks = sorted(range(job.num_processes), key=lambda rank: rank != failed)[:LOGGED_RANKS]
    room = max(LINE_CHARACTERS, LOG_CHARACTERS // max(1, len(ranks)))
    stream = handle.stream(LINES, earlier=False)
    has_skipped = stream.skip(stream.end(status), TAIL)
    return [
        {
            "rank": rank,
            "lines": [line.text[:LINE_CHARACTERS] for line in lines],
            "times": [None if line.time is None else round(line.time - job.created, 1) for line in lines],
            "cut": is_cut or has_skipped,
        }
        for rank, (lines, is_cut) in sorted(tails(parsed(stream.new(status)), ranks, room).items())
        if lines
    ]


def draw(handle: RunHandle[Any]) -> str:
    """Returns the report of a run as HTML. Raises RunNotFoundError like `collect`."""
    return render(collect(handle))


def render(run: dict[str, Any]) -> str:
    """Returns the page of the facts that `collect` has returned.

    A log line or a metric's name can be no code in it: it travels as JSON, the page shows it as text, and the browser
    is told to run nothing but the script with this one's checksum.
    """
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(plain(run), separators=(",", ":"), allow_nan=False)
    # The JSON ends no <script> element, whatever is in it.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    body = (
        "<noscript>This report draws itself with JavaScript, which is switched off here.</noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
    )
    return document(run["id"], body, f"script-src 'sha256-{digest}'; ")


def document(title: str, body: str, policy: str = "") -> str:
    """Returns a page in the style of the report around HTML, which loads nothing and runs what ``policy`` allows."""
    parts = {
        "{policy}": f"default-src 'none'; style-src 'unsafe-inline'; {policy}base-uri 'none'; form-action 'none'",
        "{title}": html.escape(title),
        "{style}": _part("page.css"),
        "{body}": body,
    }
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], _part("page.html"))


@functools.cache
def _part(name: str) -> str:
    return (pkgutil.get_data(__name__, name) or b"").decode()


def plain(value: Any) -> Any:
    """Returns a value with ``nan`` and ``inf`` as text, since a browser's JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
