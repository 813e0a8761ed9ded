"""Read-only pages of a store: the list of its runs, the report of one or several runs.

`answer` is independent of the server; `ReportServer` shows the pages in a browser of this machine.
"""

from __future__ import annotations

import hmac
import http
import http.cookies
import http.server
import json
import logging
import math
import re
import secrets
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero import store
from rankzero.errors import RankZeroError, RunNotFoundError
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

RUNS_OF_PAGE = 100
"""Runs on one page of the list."""

HOST = "127.0.0.1"
"""The address unless another one is given: what runs print is for those who may log in here."""

_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


def answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee = lambda job: True) -> Answer:
    """The answer to a request.

    Args:
        location: Root of the run directories.
        path: ``/`` for the list of runs, ``/runs/ID`` for a report, ``/runs/ID.json`` for its facts, ``/compare`` for
            several runs.
        query: Of ``/compare``: the ids as ``run``. Of ``/``: ``page``, and ``search`` in ids, names and states.
        may_see: A run that it denies is not there for who asks.
    """
    try:
        return _answer(location, path, query, may_see)
    except (RankZeroError, OSError, ValueError) as error:
        return MISSING, "text/plain", str(error).splitlines()[0] if str(error) else ""


def _answer(location: str, path: str, query: Mapping[str, Sequence[str]], may_see: MaySee) -> Answer:
    if path == "/":
        return FOUND, "text/html", _list(location, query, may_see)
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


def _list(location: str, query: Mapping[str, Sequence[str]], may_see: MaySee) -> str:
    search = query.get("search", [""])[0]
    found = [
        one
        for one in sorted(list_runs(location), key=lambda one: -one.job.created)
        if may_see(one.job) and search.lower() in f"{one.job.run_id} {one.job.name} {one.status.state}".lower()
    ]
    pages = max(1, math.ceil(len(found) / RUNS_OF_PAGE))
    number = min(max(1, int(query.get("page", ["1"])[0])), pages)
    shown = found[(number - 1) * RUNS_OF_PAGE : number * RUNS_OF_PAGE]
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
        for one in shown
    ]
    return page.render_list(location, runs, number, pages, search)


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves `answer` at an address of this machine, until it is closed.

    Other users of this machine can reach the address, too, so it answers only who knows a token: from the printed URL,
    and then by a cookie.

    Args:
        location: Root of the run directories, a path or an fsspec URL.
        port: 0 for any free one.
        token: What a browser has to know; None makes one up, ``""`` asks for none (behind a proxy with a login).
        host: Address to listen on.
        names: Names under which the server may be asked for, in addition to those of this machine; a proxy passes on
            the name that its users know.
        root_path: Path below which a proxy shows the pages, such as ``/reports``; empty for none. The proxy may pass it
            on or remove it.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(
        self,
        location: str,
        port: int,
        token: str | None = None,
        host: str = HOST,
        names: Sequence[str] = (),
        root_path: str = "",
    ) -> None:
        self.location = store.normalize(location)
        self.token = secrets.token_urlsafe(16) if token is None else token
        self._host = host
        self.names = frozenset(name.lower() for name in names)
        self.root_path = f"/{root_path.strip('/')}".rstrip("/")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another --port, or 0") from None

    @property
    def url(self) -> str:
        """Address of this server for a browser, with the token."""
        address = f"http://{self._host}:{self.server_address[1]}{self.root_path}/"
        return address + (f"?token={self.token}" if self.token else "")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # Seconds for a browser to send a request

    def do_GET(self) -> None:
        # Another site's page may have its name resolved to this machine, and would then read what is here.
        name = self.headers.get("Host", "").lower()
        if not _LOCAL.fullmatch(name) and re.sub(r":\d+$", "", name) not in self.server.names:
            text = "ask for this page at 127.0.0.1, or start `rankzero serve` with --allow-host and this name"
            self._send(http.HTTPStatus.FORBIDDEN, "text/plain", text)
            return
        parsed = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parsed.query)
        if not self._knows_token(query):
            self._send(http.HTTPStatus.FORBIDDEN, "text/plain", "open the address that `rankzero serve` printed")
            return
        root, path = self.server.root_path, parsed.path
        if root and path == root:
            # Links of the pages are relative.
            where = parsed._replace(scheme="", netloc="", path=f"{root}/").geturl()
            self._send(http.HTTPStatus.TEMPORARY_REDIRECT, "text/plain", "", {"Location": where})
            return
        if path.startswith(f"{root}/"):
            path = path.removeprefix(root)
        code, kind, text = answer(self.server.location, path, query)
        self._send(http.HTTPStatus(code), kind, text)

    do_HEAD = do_GET

    def _knows_token(self, query: dict[str, list[str]]) -> bool:
        expected = self.server.token
        cookies = http.cookies.SimpleCookie(self.headers.get("Cookie", ""))
        held = cookies[self._cookie].value if self._cookie in cookies else ""
        return any(hmac.compare_digest(expected.encode(), one.encode()) for one in (held, *query.get("token", [])))

    @property
    def _cookie(self) -> str:
        # Browsers tell ports of one host apart for nothing.
        return f"rankzero-{self.server.server_address[1]}"

    def _send(self, code: http.HTTPStatus, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (HEADERS | (more or {})).items():
            self.send_header(name, value)
        if code == http.HTTPStatus.OK and self.server.token:
            self.send_header("Set-Cookie", f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
