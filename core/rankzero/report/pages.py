"""Read-only pages of a store: the list of its runs, the report of one or several runs.

`answer` is independent of the server; `ReportServer` shows the pages in a browser of this machine.
"""

from __future__ import annotations

import hmac
import http
import http.server
import json
import logging
import re
import secrets
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero import store
from rankzero.errors import InvalidJobError, RankZeroError, RunNotFoundError
from rankzero.job import Job
from rankzero.report import page
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.listing import list_runs
from rankzero.run.reports import TOTALS

HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
"""Of every answer."""

FOUND, MISSING = 200, 404

Answer = tuple[int, str, str]
"""Code, type of the content, and the content."""

MaySee = Callable[[Job], bool]
"""Whether who asks may see a run: its lines may tell what its data are."""

logger = logging.getLogger(__name__)

MAX_RUNS = 500
"""Newest runs that the list of a store shows."""

HOST = "127.0.0.1"
"""The address unless another one is given: what runs print is for those who may log in here."""


def answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee = lambda job: True) -> Answer:
    """The answer to a request.

    Args:
        location: Root of the run directories.
        path: ``/`` for the list of runs, ``/runs/ID`` for a report, ``/runs/ID.json`` for its facts, ``/compare`` for
            several runs.
        query: Of ``/compare``: the ids as ``run``.
        may_see: A run that it denies is not there for who asks.
    """
    try:
        return _answer(location, path, query, may_see)
    except (RankZeroError, OSError, ValueError) as error:
        return MISSING, "text/plain", str(error).splitlines()[0] if str(error) else ""


def _answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee) -> Answer:
    if path == "/":
        return FOUND, "text/html", _list(location, may_see)
    if path == "/compare":
        if "run" not in query:
            raise ValueError("name runs: compare?run=ID&run=ID")
        return FOUND, "text/html", page.render([_run(location, one, may_see) for one in query["run"]])
    if path.startswith("/runs/") and path.endswith(".json"):
        name = path.removeprefix("/runs/").removesuffix(".json")
        return FOUND, "application/json", json.dumps(page.plain(_run(location, name, may_see)), allow_nan=False)
    if path.startswith("/runs/"):
        return FOUND, "text/html", page.render([_run(location, path.removeprefix("/runs/"), may_see)])
    return MISSING, "text/plain", "there is no such page"


def _run(location: str, name: str, may_see: MaySee) -> dict[str, Any]:
    name = urllib.parse.unquote(name)
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no run id")
    directory = store.join(location, name)
    if not may_see(RunDirectory(directory).job()):
        raise RunNotFoundError(f"no run lives in {directory}")
    return page.collect(RunHandle.attach(directory, follows=False))


def _list(location: str, may_see: MaySee) -> str:
    found = sorted((one for one in list_runs(location) if may_see(one.job)), key=lambda one: -one.job.created)
    runs = [
        {
            "id": one.job.run_id,
            "name": one.job.name,
            "state": one.status.state,
            "world": one.job.world,
            "created": one.job.created,
            "started": one.status.started,
            "ended": one.status.ended,
            "used": page.used_of(one.job, one.status),
            "last": {name: value for name, value in one.status.metrics.items() if name not in TOTALS},
        }
        for one in found[:MAX_RUNS]
    ]
    return page.render_list(location, runs, len(found) - len(runs))


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves `answer` at an address of this machine, until it is closed.

    Other users of this machine, and pages of other sites, can reach the address, too. So it answers only below a path
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
        self._host = host
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another --port, or 0") from None

    @property
    def url(self) -> str:
        """Address of this server for a browser, with the token."""
        return f"http://{self._host}:{self.server_address[1]}/{self.token}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # Seconds for a browser to send a request

    def do_GET(self) -> None:
        parsed = urllib.parse.urlsplit(self.path)
        token, slash, path = parsed.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(http.HTTPStatus.FORBIDDEN, "text/plain", "open the address that `rankzero serve` printed")
        elif not slash:
            # Links of the pages are relative.
            self._send(http.HTTPStatus.TEMPORARY_REDIRECT, "text/plain", "", f"{token}/")
        else:
            code, kind, text = answer(self.server.location, f"/{path}", urllib.parse.parse_qs(parsed.query))
            self._send(http.HTTPStatus(code), kind, text)

    do_HEAD = do_GET

    def _send(self, code: http.HTTPStatus, kind: str, text: str, location: str = "") -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (HEADERS | ({"Location": location} if location else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
