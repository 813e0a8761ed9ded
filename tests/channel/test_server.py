"""The server takes agents that prove the secret, drops everybody else, and goes on serving."""

import hashlib
import os
import queue
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero.channel import auth, frames
from rankzero.channel import server as server_module
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.frames import FrameError, Message
from rankzero.channel.server import LOST, ChannelServer

TIMEOUT = 5.0


class Serving:
    def __init__(self, directory: Path) -> None:
        self.inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.secret = auth.new_secret()
        self.offered = directory / "offered"
        self.offered.write_bytes(os.urandom(3 << 20))
        self.server = ChannelServer(
            self.secret,
            "127.0.0.1",
            lambda task, message: self.inbox.put((task, message)),
            served={"payload": str(self.offered)},
            upload_directory=str(directory),
        )
        self.address = ("127.0.0.1", self.server.start())

    def client(self, task: int = 0, secret: str | None = None) -> ChannelClient:
        client = ChannelClient(self.address, secret or self.secret, task)
        client.connect()
        return client

    def next(self) -> tuple[int, Message]:
        return self.inbox.get(timeout=TIMEOUT)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.server.close()


def receive(client: ChannelClient, until: Callable[[list[Any]], bool]) -> list[Any]:
    got: list[Any] = []
    deadline = time.monotonic() + TIMEOUT
    while not until(got):
        assert time.monotonic() < deadline, f"only got {len(got)} frames"
        select.select([client.socket], [], [], 0.1)
        got += list(client.receive())
    return got


def send(client: ChannelClient, *frames_to_send: Message | bytes) -> None:
    for frame in frames_to_send:
        client.queue(frame)
    deadline = time.monotonic() + TIMEOUT
    while client.unsent_bytes and time.monotonic() < deadline:
        select.select([], [client.socket], [], 0.1)
        client.flush()


def test_messages_go_both_ways(serving: Serving) -> None:
    first, second = serving.client(0), serving.client(1)
    send(first, {"type": "join", "n": 1})
    assert serving.next() == (0, {"type": "join", "n": 1})
    serving.server.broadcast({"type": "go"})
    serving.server.send(1, {"type": "start"})
    assert receive(first, lambda got: len(got) == 1) == [{"type": "go"}]
    assert receive(second, lambda got: len(got) == 2) == [{"type": "go"}, {"type": "start"}]
    first.close()
    assert serving.next() == (0, {"type": LOST})
    second.close()


def test_a_wrong_secret_is_dropped_and_the_others_are_served(serving: Serving) -> None:
    good = serving.client(0)
    with pytest.raises((ChannelClosed, FrameError, ConnectionError)):
        serving.client(1, secret=auth.new_secret())
    send(good, {"type": "join"})
    assert serving.next() == (0, {"type": "join"})
    good.close()


def test_an_agent_finds_out_a_false_driver() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = ChannelClient(listener.getsockname(), auth.new_secret(), 0)
        import threading

        def pretend() -> None:
            peer, _ = listener.accept()
            peer.sendall(frames.encode({"type": "challenge", "nonce": "00"}))
            peer.recv(4096)
            peer.sendall(frames.encode({"type": "welcome", "proof": "00" * 32}))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(FrameError, match="did not prove"):
            client.connect()
        client.close()


def test_a_replayed_answer_is_refused(serving: Serving) -> None:
    """What was recorded from one handshake proves nothing in the next: the nonce differs."""
    client_nonce = auth.new_nonce()

    def answer(peer: socket.socket, proof: str) -> bytes:
        peer.sendall(frames.encode({"type": "answer", "task": 3, "nonce": client_nonce, "proof": proof}))
        peer.settimeout(TIMEOUT)
        return peer.recv(4096)

    with socket.create_connection(serving.address) as peer:
        challenge = frames.Decoder()
        challenge.feed(peer.recv(4096))
        nonce = next(challenge)["nonce"]  # type: ignore[index,call-overload]
        proof = auth.proof(serving.secret, auth.TO_DRIVER, nonce, client_nonce, 3)
        assert b"welcome" in answer(peer, proof)
    assert serving.next() == (3, {"type": LOST})
    with socket.create_connection(serving.address) as peer:
        peer.recv(4096)
        assert answer(peer, proof) == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02J{",
        b"\xff\xff\xff\xff",
        frames.encode({"type": "answer"}),
        frames.encode({"type": "answer", "task": -1, "nonce": "00", "proof": "00"}),
        frames.encode({"type": "answer", "task": True, "nonce": "00", "proof": "00"}),
        frames.encode({"type": "answer", "task": 0, "nonce": "00", "proof": "\u00e9"}),
        frames.encode(b"bytes"),
    ],
)
def test_malformed_peers_are_dropped_without_effect(serving: Serving, garbage: bytes) -> None:
    good = serving.client(0)
    with socket.create_connection(serving.address) as peer:
        peer.settimeout(TIMEOUT)
        peer.recv(4096)
        peer.sendall(garbage)
        assert peer.recv(4096) == b""
    send(good, {"type": "join"})
    assert serving.next() == (0, {"type": "join"})
    good.close()


def test_a_peer_that_says_nothing_is_dropped(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT", 0.2)
    with socket.create_connection(serving.address) as peer:
        peer.settimeout(TIMEOUT)
        peer.recv(4096)
        assert peer.recv(4096) == b""


def test_a_second_agent_of_the_same_task_is_refused(serving: Serving) -> None:
    first = serving.client(0)
    second = serving.client(0)
    with pytest.raises(ChannelClosed):
        receive(second, lambda got: bool(got))
    send(first, {"type": "join"})
    assert serving.next() == (0, {"type": "join"})
    first.close()


def test_files_are_fetched_in_chunks(serving: Serving) -> None:
    client = serving.client(0)
    send(client, {"type": "fetch", "name": "payload"}, {"type": "fetch", "name": "/etc/passwd"})
    expected = serving.offered.read_bytes()

    def complete(got: list[Any]) -> bool:
        return sum(len(frame) for frame in got if isinstance(frame, bytes)) == len(expected) and len(got) > 4

    announced, *chunks, refused = receive(client, complete)
    assert announced == {"type": "file", "name": "payload", "size": len(expected)}
    assert b"".join(chunks) == expected
    assert refused["error"] == "no such file is offered"
    client.close()


def test_an_upload_lands_whole_and_hashed(serving: Serving) -> None:
    client = serving.client(0)
    data = os.urandom((2 << 20) + 5)
    chunks = [data[start : start + frames.CHUNK] for start in range(0, len(data), frames.CHUNK)]
    send(client, {"type": "upload", "name": "value", "size": len(data)}, *chunks, {"type": "commit"})
    task, uploaded = serving.next()
    assert (task, uploaded["type"]) == (0, "uploaded")
    assert Path(uploaded["path"]).read_bytes() == data
    assert uploaded["sha256"] == hashlib.sha256(data).hexdigest()
    assert serving.next() == (0, {"type": "commit"})
    client.close()


@pytest.mark.parametrize("name", ["../value", "/etc/x", "a/b"])
def test_an_upload_cannot_leave_its_directory(serving: Serving, name: str, tmp_path: Path) -> None:
    client = serving.client(0)
    send(client, {"type": "upload", "name": name, "size": 1}, b"x")
    assert serving.next() == (0, {"type": LOST})
    assert not (tmp_path.parent / "value").exists()
