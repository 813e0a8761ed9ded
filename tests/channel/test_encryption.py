"""Encrypted connections: who listens on the wire reads nothing, who has another certificate is not the driver."""

import contextlib
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.channel.conftest import Proxy, Serving

from rankzero import EngineError, InvalidJobError, Launcher
from rankzero.channel.client import ChannelClosed
from rankzero.channel.frames import Message
from rankzero.channel.tls import make_identity

WORDS = b"what nobody on the wire may read"
Receive = Callable[..., list[Message]]


def exchange(serving: Serving, proxy: Proxy, receive: Receive, directory: Path) -> bytes:
    """Sends a message and a file, fetches a file, through a proxy that listens; what it has seen."""
    serving.offered.write_bytes(WORDS * 20_000)
    mine = directory / "mine"
    mine.write_bytes(WORDS * 30_000)
    client = serving.client(hosts=["127.0.0.1"], port=proxy.port)
    client.queue({"type": "join", "words": WORDS.decode()})
    assert serving.next() == (0, {"type": "join", "words": WORDS.decode()})
    serving.server.send(0, {"type": "start", "words": WORDS.decode()})
    client.fetch("payload", str(directory / "fetched"))
    client.send_file("value", str(mine), {"type": "sent"})
    uploaded = serving.await_type("uploaded")["path"]
    receive(client, lambda got: any(message["type"] == "fetched" for message in got))
    assert (directory / "fetched").read_bytes() == WORDS * 20_000
    assert Path(uploaded).read_bytes() == WORDS * 30_000
    return bytes(proxy.seen)


def test_who_listens_reads_nothing(
    serve: Callable[..., Serving], receive: Receive, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    serving = serve(identity=make_identity())
    proxy = Proxy(serving.address)
    request.addfinalizer(proxy.close)
    seen = exchange(serving, proxy, receive, tmp_path)
    assert len(seen) > len(WORDS) * 50_000
    assert [word for word in (WORDS, b"join", b"challenge", b"nonce", b"payload") if word in seen] == []


@pytest.mark.skipif("RANKZERO_TEST_ENCRYPT" in os.environ, reason="nothing is plain then")
def test_who_listens_to_plain_connections_reads_all(
    serving: Serving, proxy: Proxy, receive: Receive, tmp_path: Path
) -> None:
    assert WORDS in exchange(serving, proxy, receive, tmp_path)


def test_another_certificate_is_not_the_drivers(
    serve: Callable[..., Serving], receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last try counts: none ends because the driver is slow.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "12")
    serving = serve(identity=make_identity())
    client = serving.client(certificate=make_identity().certificate, connect_timeout=1.0)
    with pytest.raises(ChannelClosed, match="has another certificate than the run's"):
        receive(client, lambda got: False)
    assert serving.inbox.empty()


def test_a_plain_agent_is_not_taken_by_a_driver_that_encrypts(serve: Callable[..., Serving], receive: Receive) -> None:
    serving = serve(identity=make_identity())
    serving.identity = None
    with pytest.raises(ChannelClosed, match="no driver was found"):
        receive(serving.client(connect_timeout=1.0), lambda got: False)
    assert serving.inbox.empty()


def test_a_cut_connection_goes_on_where_it_was(serve: Callable[..., Serving], request: pytest.FixtureRequest) -> None:
    serving = serve(identity=make_identity())
    proxy = Proxy(serving.address)
    request.addfinalizer(proxy.close)
    client = serving.client(hosts=["127.0.0.1"], port=proxy.port)
    for number in range(50):
        client.queue({"type": "step", "number": number})
        if number == 25:
            serving.await_type("step")
            proxy.cut()
    steps: list[Any] = []
    while len(steps) < 49:
        steps.append(serving.await_type("step")["number"])
    assert steps == list(range(1, 50))


def test_garbage_has_no_effect_and_the_agent_is_served(serve: Callable[..., Serving]) -> None:
    serving = serve(identity=make_identity())
    assert serving.hears()
    chance = random.Random(1)
    for _ in range(200):
        with contextlib.suppress(ConnectionError), socket.create_connection(serving.address, timeout=20.0) as peer:
            # Half of them begin as a record of a handshake does.
            peer.sendall(
                (b"\x16\x03\x01" if chance.random() < 0.5 else b"") + chance.randbytes(chance.randrange(1, 3000))
            )
    serving.clients[0].queue({"type": "alive"})
    assert serving.next() == (0, {"type": "alive"})
    assert serving.hears(1)


def test_a_run_encrypts_where_it_is_asked_to(launcher: Launcher) -> None:
    assert launcher.options(encrypt=True).run(lambda: "value") == "value"


def test_without_openssl_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="encrypt needs the openssl command"):
        launcher.options(encrypt=True, num_processes=1).run(len, "abc")


def test_encrypt_is_a_flag() -> None:
    with pytest.raises(InvalidJobError, match="encrypt is 'yes'"):
        Launcher(2, encrypt="yes")  # type: ignore[arg-type]
