"""Read-only pages of a store for a browser: the list of its runs, and the report of each, which is made on demand."""

from __future__ import annotations

import hmac
import html
import http.server
import logging
import re
import secrets
import time
import urllib.parse
from typing import Any

from rankzero import store
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.report import page
from rankzero.report.card import duration
from rankzero.report.summary import usage
from rankzero.run.listing import list_runs
from rankzero.run.reports import is_number

MAX_RUNS = 500  # Newest runs that the list of a store shows
HOST = "127.0.0.1"  # By default only users who may log in to this machine can read what runs print

logger = logging.getLogger(__name__)


def index(location: str) -> str:
    """Returns the page of a store: a table of its newest runs, each with a link to its report."""
    found, now = sorted(list_runs(location), key=lambda one: -one.job.created), time.time()
    rows = ["<th>run<th>state<th>ranks<th>submitted<th>used<th>metrics"]
    for one in found[:MAX_RUNS]:
        job, status = one.job, one.status
        metrics = [f"{name} {value:.5g}" for name, value in status.metrics.items() if is_number(value)][:4]
        age = f"{duration(now - job.created)} ago"
        cells = [status.state, job.world, age, usage(job, status, now), ", ".join(metrics)]
        link = f'<a href="runs/{urllib.parse.quote(job.run_id)}">{html.escape(job.run_id)}</a>'
        rows.append("".join(f"<td>{cell}" for cell in (link, *map(html.escape, cells))))
    table = f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return page.document(location, f'<h1>{html.escape(location)}</h1>\n<div class="scroll">{table}</div>')


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves the runs of a store at an address of this machine, until it is closed.

    Other users of this machine, and pages of other sites, can reach the address, too. So it responds only below a path
    that begins with a token, which cannot be guessed and stands in its URL. Raises InvalidJobError for a token that is
    short or has other characters than a path may have, and OSError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, location: str, port: int, token: str | None = None, host: str = HOST) -> None:
        self.location = store.normalize(location)
        self.token = token or secrets.token_urlsafe(16)
        if not re.fullmatch(r"[\w-]{16,}", self.token, re.ASCII):
            raise InvalidJobError("a token of served pages has 16 or more letters, digits, - and _")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another --port, or 0") from None
        self.url = f"http://{host}:{self.server_address[1]}/{self.token}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # Seconds for a browser to send a request

    def do_GET(self) -> None:
        token, slash, path = urllib.parse.urlsplit(self.path).path.removeprefix("/").partition("/")
        kind, _, name = urllib.parse.unquote(path).partition("/")
        code, form = 404, "text/plain"
        try:
            if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
                code, text = 403, "open the address that `rankzero serve` printed"
            elif kind not in ("", "runs") or (name and not kind):
                text = "there is no such page"
            else:
                text = page.draw(page.run_of(self.server.location, name)) if kind else index(self.server.location)
                code, form = 200, "text/html"
        except (RankZeroError, OSError, ValueError) as error:
            text = str(error).partition("\n")[0]
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in page.HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{form}; charset=utf-8")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
