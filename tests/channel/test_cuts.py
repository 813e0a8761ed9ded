"""A session goes on over cut, silenced and refused connections: nothing lost, doubled or out of order."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero import bounds
from rankzero.channel import auth, frames
from rankzero.channel.auth import Handshake, Hello
from rankzero.channel.client import ChannelClosed
from rankzero.channel.frames import Message
from rankzero.channel.server import DISCONNECTED, LOST, RECONNECTED
from rankzero.values.digest import digest_of_file

Receive = Callable[..., list[Message]]

MADE_UP = (DISCONNECTED, RECONNECTED)

SOMETHING = 100_000
"""Bytes: more than a handshake."""


@pytest.fixture
def cutting(proxy: Any) -> Iterator[Callable[[float, float], None]]:
    """Cuts the network at random moments in the background.

    After each second cut something comes through first, however slow this machine is.
    """
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def begin(shortest: float, longest: float) -> None:
        def cut() -> None:
            turn = passed = 0
            while not stop.wait(random.uniform(shortest, longest)):
                turn += 1
                while turn % 2 == 0 and proxy.forwarded < passed + SOMETHING and not stop.wait(0.01):
                    pass
                passed = proxy.forwarded
                proxy.cut()

        threads.append(threading.Thread(target=cut, daemon=True))
        threads[0].start()

    yield begin
    stop.set()
    for thread in threads:
        thread.join()


def test_a_cut_is_noticed_and_resumed(serving: Any, proxy: Any, receive: Receive) -> None:
    client = serving.client(port=proxy.port)
    client.queue({"type": "before"})
    assert serving.next()[1] == {"type": "before"}
    proxy.cut()
    assert serving.next()[1]["type"] == DISCONNECTED
    # Said while the agent is away.
    serving.server.broadcast({"type": "missed"})
    client.queue({"type": "after"})
    seen: list[Message] = []
    serving.await_type("after", seen)
    assert [message["type"] for message in seen] == [RECONNECTED]
    assert receive(client, lambda got: got) == [{"type": "missed"}]


def test_nothing_is_lost_doubled_or_reordered(
    serving: Any, proxy: Any, receive: Receive, cutting: Any, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CONNECTION_LOST_AFTER", lambda: 20.0)
    client = serving.client(port=proxy.port)
    client.queue({"type": "join"})
    serving.await_type("join")
    cutting(0.02, 0.2)
    count = 1500
    for number in range(count):
        client.queue({"type": "control", "n": number})
        client.queue({"type": "log", "n": number, "text": "x" * 4000}, bulk=True)
        serving.server.send(0, {"type": "down", "n": number, "text": "y" * 1000})
        if number % 100 == 0:
            time.sleep(0.05)
    down = receive(client, lambda got: len(got) >= count)
    up: list[Message] = []
    while sum(message["type"] == "log" for message in up) < count:
        up.append(serving.next()[1])
    assert [message["n"] for message in down] == list(range(count))
    for kind in ("control", "log"):
        assert [message["n"] for message in up if message["type"] == kind] == list(range(count))
    made_up = [message["type"] for message in up if message["type"] in MADE_UP]
    assert len(made_up) > 1
    assert made_up[:2] == [DISCONNECTED, RECONNECTED]


def test_files_on_their_way_arrive_whole_over_several_cuts(
    serving: Any, proxy: Any, receive: Receive, tmp_path: Path
) -> None:
    size = 24 << 20
    serving.offered.write_bytes(os.urandom(size))
    path = tmp_path / "value"
    path.write_bytes(os.urandom(size))
    client = serving.client(port=proxy.port)
    client.queue({"type": "join"})
    serving.await_type("join")
    proxy.cut_at = [step * (6 << 20) for step in range(1, 5)]
    client.send_file("value", str(path), {"type": "commit"})
    client.fetch("payload", str(tmp_path / "got"))
    got = receive(client, lambda got: got)[0]
    assert got == {"type": "fetched", "name": "payload", "path": str(tmp_path / "got")}
    assert (tmp_path / "got").read_bytes() == serving.offered.read_bytes()
    seen: list[Message] = []
    uploaded = serving.await_type("uploaded", seen)
    assert uploaded["digest"] == digest_of_file(str(path))
    serving.await_type("commit")
    assert [message["type"] for message in seen].count(RECONNECTED) >= 3
    assert proxy.cut_at == []


def test_silence_breaks_a_connection_and_the_next_one_goes_on(
    serving: Any, proxy: Any, receive: Receive, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CONNECTION_LOST_AFTER", lambda: 20.0)
    client = serving.client(port=proxy.port)
    client.queue({"type": "join"})
    serving.await_type("join")
    proxy.hole()
    client.queue({"type": "into the hole"})
    assert serving.next()[1]["type"] == DISCONNECTED
    serving.server.send(0, {"type": "out of the hole"})
    proxy.heal()
    seen: list[Message] = []
    serving.await_type("into the hole", seen)
    assert RECONNECTED in [message["type"] for message in seen]
    assert receive(client, lambda got: got) == [{"type": "out of the hole"}]
    client.queue({"type": "last"})
    serving.await_type("last", seen)
    assert "into the hole" not in [message["type"] for message in seen]


def test_silence_is_the_end_for_both_when_it_lasts(serving: Any, proxy: Any, receive: Receive, fast: None) -> None:
    client, other = serving.client(0, port=proxy.port), serving.client(1)
    client.queue({"type": "join"})
    serving.await_type("join")
    proxy.hole()
    with pytest.raises(ChannelClosed, match="nothing was received from the driver for 2 s"):
        receive(client, lambda got: got)
    heard: list[tuple[int, Message]] = []
    while (0, LOST) not in [(task, message["type"]) for task, message in heard]:
        heard.append(serving.next())
    types = [message["type"] for task, message in heard if task == 0]
    # A machine that stood still for a second has cut the connection before.
    assert types == [DISCONNECTED, RECONNECTED] * (len(types) // 2 - 1) + [DISCONNECTED, LOST]
    proxy.heal()
    other.queue({"type": "still here"})
    # A machine that stood still for a second has cut that one, too.
    seen: list[Message] = []
    serving.await_type("still here", seen)
    assert LOST not in [message["type"] for message in seen]


def test_a_driver_that_is_gone_is_given_up(serving: Any, proxy: Any, receive: Receive, fast: None) -> None:
    client = serving.client(port=proxy.port)
    client.queue({"type": "join"})
    serving.await_type("join")
    proxy.close()
    with pytest.raises(ChannelClosed, match="nothing was received from the driver for 2 s: .*refused"):
        receive(client, lambda got: got)
    client.queue({"type": "to nobody"})
    client.close(5.0)


def test_close_delivers_over_a_cut(serving: Any, proxy: Any) -> None:
    client = serving.client(port=proxy.port)
    client.queue({"type": "join"})
    serving.await_type("join")
    proxy.cut()
    for number in range(100):
        client.queue({"type": "log", "n": number}, bulk=True)
    client.close(10.0)
    seen: list[Message] = []
    while len([message for message in seen if message["type"] == "log"]) < 100:
        seen.append(serving.next()[1])
    assert [message["n"] for message in seen if message["type"] == "log"] == list(range(100))


def test_a_second_session_of_one_task_is_refused_and_the_first_goes_on(serving: Any, receive: Receive) -> None:
    first = serving.client(0)
    first.queue({"type": "first"})
    assert serving.next() == (0, {"type": "first"})
    second = serving.client(0)
    second.queue({"type": "second"})
    with pytest.raises(ChannelClosed, match="another agent serves task 0"):
        receive(second, lambda got: got)
    first.queue({"type": "still first"})
    assert serving.next() == (0, {"type": "still first"})
    first.close(5.0)
    third = serving.client(0)
    third.queue({"type": "third"})
    assert serving.next() == (0, {"type": "third"})


class Bare:
    """An agent by hand: a handshake, and then whatever bytes a test likes."""

    def __init__(self, serving: Any, **hello: Any) -> None:
        facts = {"task": 0, "session": "s", "number": 1, "received": 0, "resume": False, **hello}
        self.socket = socket.create_connection(serving.address)
        self.socket.settimeout(10.0)
        self.decoder = frames.Decoder()
        challenge = self.read()
        self.handshake = Handshake(serving.secret, challenge["nonce"], auth.new_nonce())
        self.answer = frames.encode(self.handshake.answer(Hello(**facts)))
        self.socket.sendall(self.answer)
        self.verdict = self.read()
        self.sealer, theirs = self.handshake.sealers()
        self.decoder.trust(theirs)

    def read(self) -> Message:
        while (body := self.decoder.next_body()) is None:
            data = self.socket.recv(4096)
            if not data:
                return {"type": "closed"}
            self.decoder.feed(data)
        return frames.parse(body[1:])

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            self.socket.sendall(frames.pack(body, self.sealer))

    def is_closed(self) -> bool:
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


@pytest.fixture
def bare(serving: Any) -> Iterator[Callable[..., Bare]]:
    made: list[Bare] = []

    def make(**hello: Any) -> Bare:
        made.append(Bare(serving, **hello))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


def test_an_answer_that_was_held_up_does_not_undo_a_later_one(serving: Any, bare: Callable[..., Bare]) -> None:
    current = bare(number=7)
    assert current.verdict["type"] == "welcome"
    assert bare(number=7).verdict["type"] == "closed"
    assert bare(number=3).verdict["type"] == "closed"
    current.send(b'J{"type":"hello"}')
    assert serving.next() == (0, {"type": "hello"})


def test_an_unknown_session_cannot_be_resumed(serving: Any, bare: Callable[..., Bare]) -> None:
    assert "not known" in bare(resume=True).verdict["reason"]
    assert bare().verdict["type"] == "welcome"


def test_an_impossible_count_ends_the_session(serving: Any, bare: Callable[..., Bare]) -> None:
    first = bare()
    assert "impossible" in bare(number=2, resume=True, received=5).verdict["reason"]
    assert serving.next()[1]["type"] == LOST
    assert first.is_closed()


@pytest.mark.parametrize(
    "bodies",
    [
        [b'J{"type":"lost"}'],
        [b'L{"type":"uploaded"}'],
        [b"J[]"],
        [b"J{"],
        [b"X"],
        [b"C" + frames.dump({"type": "nonsense"})],
        [b"C" + frames.dump({"type": "upload"})],
        [b"C" + frames.dump({"type": "upload", "stream": 1, "name": "a", "like": ""})] * 2,
        [b"C" + frames.dump({"type": "upload-end", "stream": 1, "error": None, "then": {"type": "x"}})],
        [
            b"C" + frames.dump({"type": "upload", "stream": 1, "name": "a", "like": ""}),
            b"C" + frames.dump({"type": "upload-end", "stream": 1, "error": None, "then": {"type": "lost"}}),
        ],
        [b"C" + frames.dump({"type": "fetch", "stream": "1", "name": "payload"})],
        [b"B\0\0\0\1content"],
        [b"B"],
        [b"A"],
        [b"A" + b"\xff" * 16],
        [b'L{"type":"log","text":"' + b"x" * (frames.BULK_WINDOW // 2) + b'"}'] * 4,
    ],
)
def test_an_agent_that_breaks_the_rules_is_lost_and_the_others_are_served(serve: Any, bodies: list[bytes]) -> None:
    serving = serve(can_take=lambda: False)
    good, bad = serving.client(1), Bare(serving)
    # The last of them may find the door closed.
    with contextlib.suppress(ConnectionError):
        bad.send(*bodies)
    assert serving.await_type(LOST)["reason"].startswith("agent 0 broke the channel's rules")
    assert bad.is_closed()
    good.queue({"type": "join"})
    assert serving.next() == (1, {"type": "join"})
    assert "given up" in Bare(serving, number=2, resume=True).verdict["reason"]
    # What it left is removed in the background.
    deadline = time.monotonic() + 10.0
    while (left := list(serving.directory.glob(".upload*"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_changed_or_repeated_frame_breaks_the_connection_only(serving: Any, bare: Callable[..., Bare]) -> None:
    for number, spoil in enumerate((lambda data: data[:-1] + b"?", lambda data: data * 2)):
        agent = bare(number=number + 1, resume=number > 0)
        assert agent.verdict["type"] == "welcome"
        agent.socket.sendall(spoil(frames.pack(b'J{"type":"pay"}', agent.sealer)))
        assert agent.is_closed()
    last = bare(number=3, resume=True)
    # The changed one did not count, of the repeated ones one did.
    assert last.verdict["received"] == 1
    types = [serving.next()[1]["type"] for _ in range(5)]
    assert types == [DISCONNECTED, RECONNECTED, "pay", DISCONNECTED, RECONNECTED]


def test_a_recorded_connection_proves_nothing(serving: Any, bare: Callable[..., Bare]) -> None:
    first = bare()
    first.send(b'J{"type":"pay"}')
    assert serving.next() == (0, {"type": "pay"})
    recorded = first.answer + frames.pack(b'J{"type":"pay"}', first.handshake.sealers()[0])
    first.socket.close()
    assert serving.next()[1]["type"] == DISCONNECTED
    with socket.create_connection(serving.address) as peer:
        peer.settimeout(10.0)
        peer.recv(4096)
        peer.sendall(recorded)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(4096) == b""
    assert serving.inbox.empty()
