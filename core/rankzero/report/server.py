"""The runs of a store in a browser of this machine: a list, and the report of each. Nothing can be changed there."""

from __future__ import annotations

import hmac
import http
import http.cookies
import http.server
import logging
import re
import secrets
import urllib.parse
from typing import Any

from rankzero import bounds, store
from rankzero.report import pages

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""The only address: what runs print is for those who may log in here."""

_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class ReportServer(http.server.ThreadingHTTPServer):
    """Answers with what `rankzero.report.pages` has: the list of runs, reports, their facts.

    Other users of this machine can reach the address, too, so it answers only who knows a token: from the printed URL,
    and then by a cookie.

    Args:
        location: Root of the run directories, a path or an fsspec URL.
        port: 0 for any free one.
        token: What a browser has to know; None makes one up, ``""`` asks for none (behind a proxy with a login).

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, location: str, port: int, token: str | None = None) -> None:
        self.location = store.normalize(location)
        self.token = secrets.token_urlsafe(16) if token is None else token
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """Address of this server for a browser, with the token."""
        return f"http://{HOST}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = bounds.BROWSER_REQUEST_TIMEOUT

    def do_GET(self) -> None:
        # Another site's page may have its name resolved to this machine, and would then read what is here.
        if not _LOCAL.fullmatch(self.headers.get("Host", "")):
            self._send(http.HTTPStatus.FORBIDDEN, "text/plain", "ask for this page at 127.0.0.1")
            return
        parsed = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parsed.query)
        if not self._knows_token(query):
            self._send(http.HTTPStatus.FORBIDDEN, "text/plain", "open the address that `rankzero serve` printed")
            return
        code, kind, text = pages.answer(self.server.location, parsed.path, query)
        self._send(http.HTTPStatus(code), kind, text)

    def _knows_token(self, query: dict[str, list[str]]) -> bool:
        expected = self.server.token
        cookies = http.cookies.SimpleCookie(self.headers.get("Cookie", ""))
        held = cookies[self._cookie].value if self._cookie in cookies else ""
        return any(hmac.compare_digest(expected.encode(), one.encode()) for one in (held, *query.get("token", [])))

    @property
    def _cookie(self) -> str:
        # Browsers tell ports of one host apart for nothing.
        return f"rankzero-{self.server.server_address[1]}"

    def _send(self, code: http.HTTPStatus, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in pages.HEADERS.items():
            self.send_header(name, value)
        if code == http.HTTPStatus.OK and self.server.token:
            self.send_header("Set-Cookie", f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
