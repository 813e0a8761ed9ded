"""The part of a Kubernetes API server that spark-submit and the official client use. It records what it is given."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class KubernetesApi(ThreadingHTTPServer):
    """Holds objects by the path at which they were created, and refuses the kinds in ``refused``."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.objects: dict[str, dict[str, Any]] = {}
        self.refused: set[str] = set()

    @property
    def master(self) -> str:
        return f"k8s://{self._scheme}://127.0.0.1:{self.server_address[1]}"

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [found for path, found in self.objects.items() if path.split("/")[-2] == kind]


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return found

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self) -> None:
        self._answer(
            404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        )

    def do_POST(self) -> None:
        body = self._body()
        if self._path().split("/")[-1] in self.server.refused:
            self._answer(403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403})
            return
        path = f"{self._path()}/{body['metadata']['name']}"
        body["metadata"]["uid"] = f"uid-{len(self.server.objects)}"
        self.server.objects[path] = body
        self._answer(201, body)

    def do_GET(self) -> None:
        found = self.server.objects.get(self._path())
        if found is None:
            self._missing()
        else:
            self._answer(200, found)

    def do_PATCH(self) -> None:
        path, change = self._path(), self._body()
        found = self.server.objects.setdefault(path, {"metadata": {"uid": f"uid-{len(self.server.objects)}"}})
        found["metadata"] |= change.get("metadata", {})
        found |= {name: value for name, value in change.items() if name != "metadata"}
        self._answer(200, found)

    def do_PUT(self) -> None:
        self.server.objects[self._path()] = body = self._body()
        self._answer(200, body)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._path(), None)
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


@contextlib.contextmanager
def kubernetes_api(tls: ssl.SSLContext | None = None) -> Iterator[KubernetesApi]:
    """Yields an API server that serves until the block ends."""
    server = KubernetesApi(tls)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
