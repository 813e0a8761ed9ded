"""A server that speaks S3, as a process of its own, for tests of what lies on an object store."""

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import servers
from tests.conftest import free_port, until

START_TIMEOUT = 180

SERVER = """
import sys
import threading
import time

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

LATE = 7.0
SLOW = 1.0
ERRORS = {
    "403": b"<Error><Code>AccessDenied</Code></Error>",
    "500": b"<Error><Code>InternalError</Code></Error>",
    "503": b"<Error><Code>SlowDown</Code></Error>",
}


def serve(environ, start_response):
    fault = environ.pop("HTTP_X_FAULT", "")
    if environ["REQUEST_METHOD"] == "PUT" and "/slow" in environ["PATH_INFO"] and "rank-" in environ["PATH_INFO"]:
        time.sleep(SLOW)
    if fault == "never":
        threading.Event().wait()
    if fault == "late":
        answer = list(store(environ, start_response))
        time.sleep(LATE)
        return answer
    if fault == "500":
        list(store(environ, lambda *_: None))
    if fault:
        start_response(f"{fault} Error", [("Connection", "close")])
        return [ERRORS[fault]]
    return store(environ, start_response)


def store(environ, start_response):
    if "chunked" in environ.get("HTTP_TRANSFER_ENCODING", ""):
        # Its client does not know whether there is more to come.
        start_response("411 Length Required", [("Connection", "close")])
        return [b"<Error><Code>MissingContentLength</Code></Error>"]
    if "HTTP_IF_NONE_MATCH" not in environ:
        return app(environ, start_response)
    with lock:
        return app(environ, start_response)


run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""
"""moto's, with four differences.

Of two creators of an object one wins, as S3 promises: moto looks, and then writes. Uploads whose length is not told
before are refused, as by Ceph 16 and other servers. A request whose header ``X-Fault`` names a wrong answer gets it.
A rank's part of a run whose id begins with ``slow`` is accepted after a second.
"""


class S3Server:
    """moto's server with its buckets in memory; knows what was asked of it."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    @property
    def environment(self) -> dict[str, str]:
        """What makes any client of this machine talk to it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def requests(self, method: str, path: str, among: list[str] | None = None) -> list[str]:
        """Lines of its log, or some of them: requests of a method whose path holds ``path``."""
        # Between the quote and the method there may be a colour.
        asked = re.compile(rf"{method} \S*{re.escape(path)}")
        return [line for line in (self.log() if among is None else among) if asked.search(line)]

    def log(self) -> list[str]:
        """A line for each request so far."""
        return self._log.read_text().splitlines()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Starts the server; it ends with the block."""
    port = free_port()
    log = folder / "s3.log"
    process = servers.start(sys.executable, "-c", SERVER, str(port), log=log)
    server = S3Server(f"http://127.0.0.1:{port}", log)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(server.url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    try:
        until(answers, START_TIMEOUT, "the S3 server does not answer", pause=0.1)
        yield server
    finally:
        servers.stop([process])
