"""An agent finds its driver among hosts that are closed, strange or unknown, on IPv4 and IPv6."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankzero.channel import frames
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.frames import Message

Receive = Callable[..., list[Message]]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback ::1")


@pytest.fixture
def stranger(serving: Any) -> Iterator[Callable[[bytes], str]]:
    """Makes another address of this machine, on the driver's port, answer with something."""
    listeners: list[socket.socket] = []

    def make(answer: bytes) -> str:
        listener = socket.create_server(("127.0.0.2", serving.port))
        listeners.append(listener)

        def serve() -> None:
            peers = []
            while True:
                try:
                    peer, _ = listener.accept()
                    peers.append(peer)
                    peer.sendall(answer)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return "127.0.0.2"

    yield make
    for listener in listeners:
        listener.close()


def test_a_closed_port_is_skipped(serving: Any) -> None:
    assert serving.hears(hosts=["127.0.0.3", "127.0.0.1"])


def test_a_name_that_does_not_resolve_is_skipped(serving: Any) -> None:
    assert serving.hears(hosts=["no-such-host.invalid", "not a name..", "x" * 300, "127.0.0.1"])


CHALLENGE = frames.encode({"type": "challenge", "nonce": "00"})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.encode({"type": "challenge"}),
        frames.encode({"type": "welcome", "received": 0}),
        frames.encode(b"bytes"),
        CHALLENGE,
        CHALLENGE + frames.encode({"type": "welcome", "received": 0, "proof": "00" * 32}),
        CHALLENGE + frames.encode({"type": "refused", "reason": "go away", "proof": "00" * 32}),
        CHALLENGE + frames.encode({"type": "farewell"}),
    ],
)
def test_a_stranger_who_answers_is_skipped(
    serving: Any, stranger: Callable[[bytes], str], answer: bytes, fast: None
) -> None:
    assert serving.hears(hosts=[stranger(answer), "127.0.0.1"])


def test_the_agent_says_what_it_tried(receive: Receive, fast: None) -> None:
    # The address that needs no lookup comes first: a resolver may take longer than the time-out.
    client = ChannelClient(["127.0.0.1", "no-such-host.invalid"], 1, "00" * 32, 0, connect_timeout=3.0)
    client.start()
    with pytest.raises(ChannelClosed, match=r"no driver was found on port 1 .*127.0.0.1: .*refused; no-such-host"):
        receive(client, lambda got: got)
    client.close(1.0)


def test_a_wrong_secret_finds_no_driver(serving: Any, receive: Receive, fast: None) -> None:
    good = serving.client(0)
    bad = serving.client(1, secret="11" * 32, connect_timeout=0.3)
    bad.queue({"type": "evil"})
    with pytest.raises(ChannelClosed, match="no driver was found"):
        receive(bad, lambda got: got)
    good.queue({"type": "join"})
    assert serving.next() == (0, {"type": "join"})


@needs_ipv6
@pytest.mark.parametrize(("bind", "hosts"), [("::1", ["::1"]), ("::", ["::1"]), ("::", ["127.0.0.1"])])
def test_ipv6_and_both(serve: Any, bind: str, hosts: list[str]) -> None:
    assert serve(host=bind).hears(hosts=hosts)


def test_a_name_is_bound_and_found(serve: Any) -> None:
    assert serve(host="localhost").hears(hosts=["localhost"])
