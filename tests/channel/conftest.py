"""A server, its agents, and a network between them that can be cut, silenced and healed."""

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero import bounds
from rankzero.channel import auth
from rankzero.channel.client import ChannelClient
from rankzero.channel.frames import Message
from rankzero.channel.server import ChannelServer
from rankzero.channel.tls import Identity, make_identity
from rankzero.host.network import listen

TIMEOUT = 60.0


class Serving:
    """A running server, what it was told, and the agents that were made for it."""

    def __init__(
        self, directory: Path, host: str = "127.0.0.1", ports: tuple[int, int] | None = None, **options: Any
    ) -> None:
        self.inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.secret = auth.new_secret()
        self.directory = directory
        self.offered = directory / "offered"
        self.offered.write_bytes(os.urandom((1 << 20) + 3))
        self.clients: list[ChannelClient] = []
        options.setdefault("served", {"payload": str(self.offered), "missing": str(directory / "missing")})
        # RANKZERO_TEST_ENCRYPT=1: the room's tests, encrypted; those fail that speak plain frames themselves.
        if os.environ.get("RANKZERO_TEST_ENCRYPT"):
            options.setdefault("identity", make_identity())
        self.identity: Identity | None = options.get("identity")
        self.server = ChannelServer(
            self.secret,
            lambda task, message: self.inbox.put((task, message)),
            upload_directory=str(directory),
            **options,
        )
        self.host = host
        self.port = self.server.start(listen(host, ports))

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def client(
        self,
        task: int = 0,
        secret: str | None = None,
        hosts: Any = None,
        port: int = 0,
        certificate: bytes | None = None,
        connect_timeout: float | None = None,
        driver_lives: Callable[[], bool] = lambda: False,
    ) -> ChannelClient:
        certificate = certificate or (self.identity.certificate if self.identity else None)
        place = (hosts or [self.host], port or self.port)
        client = ChannelClient(*place, secret or self.secret, task, connect_timeout, certificate, driver_lives)
        client.start()
        self.clients.append(client)
        return client

    def hears(self, task: int = 0, hosts: list[str] | None = None) -> bool:
        """True if the first message of a new agent is what arrives next."""
        self.client(task, hosts=hosts).queue({"type": "join"})
        return self.next() == (task, {"type": "join"})

    def next(self) -> tuple[int, Message]:
        return self.inbox.get(timeout=TIMEOUT)

    def await_type(self, kind: str, seen: list[Message] | None = None) -> Message:
        """The next message of a type; those before it go to `seen`."""
        while True:
            _, message = self.next()
            if message["type"] == kind:
                return message
            if seen is not None:
                seen.append(message)

    def close(self) -> None:
        for client in self.clients:
            client.close(0.0)
        self.server.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Makes servers with options of their own."""
    made: list[Serving] = []

    def make(**options: Any) -> Serving:
        made.append(Serving(tmp_path, **options))
        return made[-1]

    yield make
    for serving in made:
        serving.close()


@pytest.fixture
def serving(serve: Callable[..., Serving]) -> Serving:
    return serve()


def _receive(client: ChannelClient, until: Callable[[list[Message]], object]) -> list[Message]:
    got: list[Message] = []
    deadline = time.monotonic() + TIMEOUT
    while not until(got):
        assert time.monotonic() < deadline, f"only got {len(got)} messages"
        select.select([client.fileno()], [], [], 0.1)
        got += client.receive()
    return got


@pytest.fixture
def receive() -> Callable[..., list[Message]]:
    """Collects a client's messages until a condition holds."""
    return _receive


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that notices and gives up within a second or two."""
    for name, value in {
        "PING_INTERVAL": 0.1,
        "CONNECTION_SILENCE": lambda: 1.0,
        "CONNECTION_LOST_AFTER": lambda: 2.0,
        "CONNECT_TRY_TIMEOUT": lambda: 0.3,
        "HANDSHAKE_REPLY_TIMEOUT": lambda: 1.0,
        "CONNECT_PAUSE_MIN": 0.02,
        "CONNECT_PAUSE_MAX": 0.1,
    }.items():
        monkeypatch.setattr(bounds, name, value)


class Proxy:
    """Forwards TCP connections to a port until they are cut or silenced."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._open = threading.Event()
        self._open.set()
        self._closed = False
        self.forwarded = 0
        self.seen = bytearray()
        self.cut_at: list[int] = []
        """Numbers of bytes that are forwarded before each cut that it makes by itself."""
        self._counting = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._target)
            except OSError:
                continue
            self._pairs.append((ours, theirs))
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._open.wait()
                # Before its receiver knows of it.
                self.seen += data
                sink.sendall(data)
                self._count(len(data))
        except OSError:
            pass
        for end in (source, sink):
            _reset(end)

    def _count(self, size: int) -> None:
        with self._counting:
            self.forwarded += size
            is_due = bool(self.cut_at) and self.forwarded >= self.cut_at[0]
            if is_due:
                self.cut_at.pop(0)
        if is_due:
            self.cut()

    def cut(self) -> None:
        """Breaks every connection; what is on its way is lost. New ones are taken."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _reset(end)

    def hole(self) -> None:
        """Keeps every connection, and forwards nothing."""
        self._open.clear()

    def heal(self) -> None:
        """Forwards again, what was held back first."""
        self._open.set()

    def close(self) -> None:
        self._closed = True
        # A thread in accept() would keep a closed listener listening.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.cut()


def _reset(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()


@pytest.fixture
def proxy(serving: Serving) -> Iterator[Proxy]:
    proxy = Proxy(serving.address)
    yield proxy
    proxy.close()
