"""Whoever does not prove the secret has no effect, whatever they send, and agents are served meanwhile."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import until

from rankzero import bounds
from rankzero.channel import auth, frames
from rankzero.channel.auth import Handshake, Hello


@contextlib.contextmanager
def strangers(serving: Any, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(serving.address, timeout=20.0)) for _ in range(count)]


def is_dropped(peer: socket.socket) -> bool:
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02J{",
        b"\xff\xff\xff\xff",
        struct.pack(">I", frames.MAX_HANDSHAKE_FRAME + 1),
        struct.pack(">I", 0),
        frames.encode({"type": "answer"}),
        frames.encode({"type": "answer", "task": -1, "nonce": "00", "proof": "00"}),
        frames.encode({"type": "answer", "task": True, "nonce": "00", "proof": "00"}),
        frames.encode({"type": "lost"}),
        frames.encode(b"bytes"),
    ],
)
def test_malformed_peers_are_dropped_without_effect(serving: Any, garbage: bytes) -> None:
    with strangers(serving, 1) as (peer,):
        peer.sendall(garbage)
        assert is_dropped(peer)
    assert serving.hears()
    assert serving.inbox.empty()


GOOD = {"task": 0, "session": "s", "number": 1, "received": 0, "resume": False}


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": -1},
        {"task": True},
        {"task": "0"},
        {"task": 1 << 70},
        {"session": ""},
        {"session": "s" * 200},
        {"session": "\u00e9"},
        {"session": None},
        {"number": -1},
        {"received": 1.5},
        {"resume": 1},
        {"nonce": 7},
        {"nonce": ""},
        {"proof": None},
        {"proof": "\u00e9"},
        {"proof": "00" * 32},
        {"type": "welcome"},
        # Proved, but for other facts than these.
        {"task": 1},
        {"received": 1},
        {"session": "t"},
        {"resume": True},
    ],
)
def test_an_answer_with_a_wrong_field_is_dropped(serving: Any, wrong: dict[str, Any]) -> None:
    with strangers(serving, 1) as (peer,):
        decoder = frames.Decoder()
        decoder.feed(peer.recv(4096))
        nonce = next(decoder)["nonce"]  # type: ignore[call-overload]
        answer = Handshake(serving.secret, nonce, auth.new_nonce()).answer(Hello(**GOOD))
        peer.sendall(frames.encode({**answer, **wrong}))
        assert is_dropped(peer)
    assert serving.hears()
    assert serving.inbox.empty()


def test_peers_that_say_little_or_nothing_are_dropped_in_time(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HANDSHAKE_TIMEOUT", lambda: 0.5)
    monkeypatch.setattr(bounds, "PING_INTERVAL", 0.2)
    with strangers(serving, 2) as (silent, slow):
        slow.sendall(struct.pack(">I", 4000))
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                slow.sendall(b"J")
                time.sleep(0.01)
        assert is_dropped(silent)
        assert is_dropped(slow)
    assert serving.hears()


def test_200_idle_strangers_do_not_stop_an_agent(serving: Any) -> None:
    with strangers(serving, 200):
        assert serving.hears()


def test_agents_that_come_all_at_once_are_all_taken(serving: Any) -> None:
    for task in range(40):
        serving.client(task).queue({"type": "join"})
    assert sorted(serving.next()[0] for _ in range(40)) == list(range(40))
    assert serving.inbox.empty()


def test_callers_that_wait_are_taken_at_one_wake_up(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, wakes, go_on = serving.server, [], threading.Event()
    wait = server._await_caller

    async def counted() -> None:
        wakes.append(time.monotonic())
        await wait()

    monkeypatch.setattr(server, "_await_caller", counted)
    server._loop.call_soon_threadsafe(go_on.wait, 10.0)
    with strangers(serving, 30):
        go_on.set()
        until(lambda: len(server._unproved) == 30, 10.0, "all callers")
        assert len(wakes) <= 3


def noise(chance: random.Random, nonce_frame: bytes) -> bytes:
    """Something between garbage and nearly right."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    if kind == 1:
        return frames.pack(chance.choice([b"J", b"B", b"A", b"C", b"L"]) + chance.randbytes(chance.randrange(60)))
    if kind == 2:
        fields = {name: chance.choice([0, -1, "x", None, True, [], {}, 1e99]) for name in [*GOOD, "nonce", "proof"]}
        return frames.encode({"type": chance.choice(["answer", "challenge", "lost", "farewell"]), **fields})
    if kind == 3:
        return struct.pack(">I", chance.randrange(1 << 32))
    if kind == 4:
        return nonce_frame
    data = bytearray(frames.encode({"type": "answer", **GOOD, "nonce": "00", "proof": "00" * 32}))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def shower(serving: Any, connections: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(connections):
        with contextlib.suppress(ConnectionError), socket.create_connection(serving.address, timeout=20.0) as peer:
            challenge = peer.recv(4096) if chance.random() < 0.5 else b""
            peer.sendall(b"".join(noise(chance, challenge) for _ in range(chance.randrange(1, 6))))
        if number % 50 == 0:
            serving.clients[0].queue({"type": "alive", "n": number})
            assert serving.next() == (0, {"type": "alive", "n": number})


def test_a_shower_of_garbage_has_no_effect_and_the_agent_is_served(serving: Any) -> None:
    assert serving.hears()
    shower(serving, 1000, seed=1)
    assert serving.inbox.empty()
    assert serving.hears(1)
