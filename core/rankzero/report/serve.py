"""Read-only pages of a store for a browser: the list of its runs, and the report of each, which is made on demand."""

from __future__ import annotations

import hmac
import html
import http
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
from rankzero.run.listing import list_runs
from rankzero.run.reports import is_number

MAX_RUNS = 500
"""Newest runs that the list of a store shows."""

HOST = "127.0.0.1"
"""The default address: only users who may log in to this machine can read what runs print."""

logger = logging.getLogger(__name__)


def index(location: str) -> str:
    """Returns the page of a store: a table of its newest runs, each with a link to its report."""
    found = sorted(list_runs(location), key=lambda one: -one.job.created)
    heads = ("run", "state", "ranks", "submitted", "used", "metrics")
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for one in found[:MAX_RUNS]:
        job, status = one.job, one.status
        link = f'<a href="runs/{urllib.parse.quote(job.run_id)}">{html.escape(job.run_id)}</a>'
        metrics = [f"{name} {value:.5g}" for name, value in status.metrics.items() if is_number(value)][:4]
        when = f"{duration(time.time() - job.created)} ago"
        used = ", ".join(f"{value} {name}" for name, value in page.used_of(job, status).items())
        cells = [link, *map(html.escape, (status.state, job.world, when, used, ", ".join(metrics)))]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    older = f"<p>{len(found) - MAX_RUNS} older runs: rankzero runs lists them.</p>" if len(found) > MAX_RUNS else ""
    title = html.escape(location)
    return page.document(location, f'<h1>{title}</h1>\n<div class="scroll"><table>{"".join(rows)}</table></div>{older}')


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves the runs of a store at an address of this machine, until it is closed.

    Other users of this machine, and pages of other sites, can reach the address, too. So it responds only below a path
    that begins with a token, which cannot be guessed and stands in its URL.

    Args:
        location: Root of the run directories, a path or an fsspec URL.
        port: 0 for any free one.
        token: The first part of every path; None makes one up. A proxy with a login of its own passes requests on to
            the path with a token that was chosen.
        host: Address to listen on.

    Raises:
        InvalidJobError: the token is short, or has other characters than a path may have.
        OSError: the port is taken.
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
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(403, "text/plain", "open the address that `rankzero serve` printed")
        kind, _, name = urllib.parse.unquote(path).partition("/")
        try:
            if kind not in ("", "runs") or (name and not kind):
                raise ValueError("there is no such page")
            text = page.draw(page.run_of(self.server.location, name)) if kind else index(self.server.location)
            self._send(200, "text/html", text)
        except (RankZeroError, OSError, ValueError) as error:
            self._send(404, "text/plain", str(error).partition("\n")[0])

    do_HEAD = do_GET

    def _send(self, code: int, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            **page.HEADERS,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
