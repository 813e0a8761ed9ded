"""Messages and files go both ways, and the server makes up its own words about who is there."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankzero import EngineError, Launcher, bounds
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.frames import FrameError, Message
from rankzero.channel.server import DISCONNECTED, LOST, ChannelServer
from rankzero.host.network import listen
from rankzero.values.digest import digest_of_file

Receive = Callable[..., list[Message]]


def digest(path: str | Path) -> str:
    return digest_of_file(str(path))


def write(path: Path, size: int) -> str:
    path.write_bytes(os.urandom(size))
    return str(path)


def test_messages_go_both_ways_in_order(serving: Any, receive: Receive) -> None:
    first, second = serving.client(0), serving.client(1)
    for task, client in enumerate((first, second)):
        client.queue({"type": "join"})
        assert serving.next() == (task, {"type": "join"})
    for number in range(100):
        first.queue({"type": "count", "n": number})
    assert [serving.next()[1]["n"] for _ in range(100)] == list(range(100))
    serving.server.broadcast({"type": "go"})
    serving.server.send(1, {"type": "start"})
    serving.server.send(7, {"type": "nobody"})
    assert receive(first, lambda got: got) == [{"type": "go"}]
    assert receive(second, lambda got: len(got) == 2) == [{"type": "go"}, {"type": "start"}]


def test_what_was_queued_before_there_is_a_driver_arrives(serving: Any) -> None:
    client = ChannelClient([serving.host], serving.port, serving.secret, 0)
    client.queue({"type": "early"})
    client.start()
    assert serving.next() == (0, {"type": "early"})
    client.close(5.0)


def test_close_delivers_everything_and_is_not_a_loss(
    serving: Any, tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stands still for a second cuts nothing here.
    monkeypatch.setattr(bounds, "CONNECTION_SILENCE", lambda: 20.0)
    path = write(tmp_path / "value", 5 << 20)
    client = serving.client()
    for number in range(200):
        client.queue({"type": "log", "n": number, "text": "x" * 50_000}, bulk=True)
    client.send_file("value", path, {"type": "commit"})
    client.queue({"type": "bye"})
    client.close(20.0)
    seen = [message for _, message in iter_queue(serving)]
    assert [message["n"] for message in seen if message["type"] == "log"] == list(range(200))
    types = [message["type"] for message in seen if message["type"] != "log"]
    assert types == ["bye", "uploaded", "commit"]
    with pytest.raises(ChannelClosed):
        client.receive()
    other = serving.client(1)
    other.queue({"type": "later"})
    # Longer than it takes to be lost: the other agent's word is the only one.
    time.sleep(bounds.CONNECTION_LOST_AFTER() + 0.5)
    assert serving.next() == (1, {"type": "later"})
    assert serving.inbox.empty()


def iter_queue(serving: Any) -> list[tuple[int, Message]]:
    return [serving.inbox.get_nowait() for _ in range(serving.inbox.qsize())]


def test_close_without_a_driver_ends_in_time() -> None:
    client = ChannelClient(["127.0.0.1"], 1, "00" * 32, 0)
    client.start()
    client.queue({"type": "join"})
    begun = time.monotonic()
    client.close(0.3)
    assert time.monotonic() - begun < 5.0
    never_started = ChannelClient(["127.0.0.1"], 1, "00" * 32, 0)
    never_started.close(1.0)


def test_a_server_that_is_closed_before_its_start_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    never_started = ChannelServer("00" * 32, lambda _: None)
    never_started.close()
    assert os.listdir("/proc/self/fd") == before
    never_started.close()


JOIN = """
import sys, time
from rankzero.channel.client import ChannelClient
client = ChannelClient([sys.argv[1]], int(sys.argv[2]), sys.argv[3], 3)
client.start()
client.queue({"type": "join"})
time.sleep(60)
"""


def test_an_agent_that_dies_is_disconnected_and_then_lost(
    serving: Any, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent, another process, pings each second only.
    monkeypatch.setattr(bounds, "CONNECTION_SILENCE", lambda: 20.0)
    with subprocess.Popen([sys.executable, "-c", JOIN, serving.host, str(serving.port), serving.secret]) as agent:
        try:
            assert serving.next() == (3, {"type": "join"})
        finally:
            agent.kill()
    assert serving.next()[1]["type"] == DISCONNECTED
    task, lost = serving.next()
    assert (task, lost["type"]) == (3, LOST)
    again = serving.client(3)
    again.queue({"type": "join"})
    assert serving.next() == (3, {"type": "join"})


def test_a_driver_that_closes_is_noticed_at_once_after_its_last_words(serving: Any, receive: Receive) -> None:
    client = serving.client()
    client.queue({"type": "join"})
    serving.next()
    serving.server.send(0, {"type": "stop"})
    serving.server.close()
    assert receive(client, lambda got: got) == [{"type": "stop"}]
    with pytest.raises(ChannelClosed, match="the driver closed the channel"):
        receive(client, lambda got: got)
    serving.server.send(0, {"type": "too late"})
    serving.server.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_closes_while_agents_come_and_go_ends_well(serve: Any) -> None:
    for go_first in (True, False) * 5:
        serving = serve()
        clients = [serving.client(task) for task in range(3)]
        for client in clients:
            client.queue({"type": "join"})
            if go_first:
                client.close(0.0)
        serving.server.close()
        # A thread says that it is done before it has ended.
        serving.server._thread.join(bounds.CHANNEL_CLOSE_TIMEOUT())
        assert not serving.server._thread.is_alive()


def test_files_are_fetched_at_once_and_missing_ones_end_in_words(
    serving: Any, receive: Receive, tmp_path: Path
) -> None:
    client = serving.client()
    names = ["payload", "payload", "missing", "/etc/passwd"]
    for number, name in enumerate(names):
        client.fetch(name, str(tmp_path / f"got-{number}"))
    client.fetch("payload", str(tmp_path / "no-such-directory" / "file"))
    got = receive(client, lambda got: len(got) == 5)
    good = [message for message in got if "path" in message]
    assert sorted(message["path"] for message in good) == [str(tmp_path / "got-0"), str(tmp_path / "got-1")]
    assert {digest(message["path"]) for message in good} == {digest(serving.offered)}
    errors = {message["error"] for message in got if "error" in message}
    assert "no such file is offered" in errors
    assert sum("No such file" in error for error in errors) == 2
    assert not (tmp_path / "got-2").exists()


def test_a_slow_store_stalls_nobody(serving: Any, receive: Receive, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankzero import store

    release = threading.Event()
    monkeypatch.setattr(store, "size", lambda location: release.wait(30.0) and os.path.getsize(location))
    client, other = serving.client(0), serving.client(1)
    client.fetch("payload", str(serving.directory / "got"))
    for each in (client, other):
        each.queue({"type": "alive"})
    assert {serving.next()[0], serving.next()[0]} == {0, 1}
    release.set()
    assert receive(client, lambda got: got)[0]["path"]


def test_an_upload_lands_whole_and_hashed_before_what_follows(serving: Any, tmp_path: Path) -> None:
    client = serving.client(2)
    paths = [write(tmp_path / "a", (3 << 20) + 5), write(tmp_path / "b", 0), write(tmp_path / "c", 10)]
    for path in paths:
        client.send_file("value", path, {"type": "commit", "of": path})
        assert serving.next() == (
            2,
            {
                "type": "uploaded",
                "name": "value",
                "path": str(tmp_path / ".upload-2-value"),
                "digest": digest(path),
                "size": os.path.getsize(path),
            },
        )
        assert digest(tmp_path / ".upload-2-value") == digest(path)
        assert serving.next() == (2, {"type": "commit", "of": path})


def test_several_uploads_go_one_after_the_other(serving: Any, tmp_path: Path) -> None:
    client = serving.client()
    paths = {f"file-{n}": write(tmp_path / f"file-{n}", n << 20) for n in range(4)}
    for name, path in paths.items():
        client.send_file(name, path, {"type": "then", "name": name})
    for name, path in paths.items():
        uploaded, then = serving.next()[1], serving.next()[1]
        assert (uploaded["digest"], then["name"]) == (digest(path), name)


def test_a_file_that_cannot_be_read_is_an_error_and_then_what_follows(serving: Any, tmp_path: Path) -> None:
    client = serving.client()
    client.send_file("value", str(tmp_path / "nothing"), {"type": "commit"})
    uploaded = serving.next()[1]
    assert uploaded["path"] is None
    assert "cannot be read" in uploaded["error"]
    assert serving.next()[1] == {"type": "commit"}


@pytest.mark.parametrize("name", ["../value", "/etc/x", "a/b", ".hidden", "", "a\0b", "\ud800"])
def test_an_upload_cannot_leave_its_directory(serving: Any, name: str, tmp_path: Path) -> None:
    client = serving.client()
    before = sorted(tmp_path.rglob("*"))
    client.send_file(name, str(serving.offered), {"type": "commit"})
    uploaded = serving.next()[1]
    assert uploaded["path"] is None
    assert uploaded["error"]
    assert serving.next()[1] == {"type": "commit"}
    assert sorted(tmp_path.rglob("*")) == before
    # All of what lies around is not compared: a JVM of other tests may write there.
    assert not any(map(os.path.exists, [tmp_path.parent / "value", "/etc/x"]))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_after_a_full_disk_the_channel_goes_on(serving: Any, tmp_path: Path) -> None:
    (tmp_path / ".upload-0-value").symlink_to("/dev/full")
    client = serving.client()
    client.send_file("value", write(tmp_path / "value", 12 << 20), {"type": "commit"})
    uploaded = serving.next()[1]
    assert uploaded["path"] is None
    assert "No space" in uploaded["error"]
    assert serving.next()[1] == {"type": "commit"}


@pytest.mark.parametrize("kind", ["disconnected", "reconnected", "lost", "uploaded", "fetched"])
def test_what_the_channel_makes_up_cannot_be_sent(serving: Any, kind: str) -> None:
    client = serving.client()
    for bulk in (True, False):
        with pytest.raises(FrameError, match="synthesized by the channel"):
            client.queue({"type": kind}, bulk=bulk)
    with pytest.raises(FrameError, match="synthesized by the channel"):
        client.send_file("value", "/etc/hostname", {"type": kind})
    with pytest.raises(FrameError, match="synthesized by the channel"):
        serving.server.broadcast({"type": kind})


def test_a_driver_that_fails_on_a_message_gets_the_next(serve: Any, tmp_path: Path) -> None:
    from rankzero.channel.server import ChannelServer

    seen: list[str] = []
    arrived = threading.Event()

    def on_message(task: int, message: Message) -> None:
        seen.append(message["type"])
        if message["type"] == "bad":
            raise RuntimeError("the driver's own error")
        arrived.set()

    secret = "ab" * 32
    server = ChannelServer(secret, on_message)
    client = ChannelClient(["127.0.0.1"], server.start(listen("127.0.0.1", None)), secret, 0)
    client.start()
    client.queue({"type": "bad"})
    client.queue({"type": "good"})
    assert arrived.wait(10.0)
    assert seen == ["bad", "good"]
    client.close(5.0)
    server.close()


def free_range() -> tuple[list[socket.socket], int]:
    """Two neighbouring ports that are taken, and the first of them."""
    while True:
        first = socket.create_server(("127.0.0.1", 0))
        try:
            second = socket.create_server(("127.0.0.1", first.getsockname()[1] + 1))
        except (OSError, OverflowError):
            first.close()
            continue
        return [first, second], first.getsockname()[1]


def test_ports_of_a_range_that_are_taken_are_skipped(serve: Any) -> None:
    taken, first = free_range()
    try:
        assert first + 1 < serve(ports=(first, first + 20)).port <= first + 20
        with pytest.raises(OSError, match=f"none of the ports {first} to {first + 1} on 127.0.0.1 is free"):
            serve(ports=(first, first + 1))
    finally:
        for listener in taken:
            listener.close()


def test_a_host_of_another_machine_is_refused_in_words(serve: Any) -> None:
    with pytest.raises(OSError, match="cannot listen on 192.0.2.1"):
        serve(host="192.0.2.1")


def test_an_agent_whose_drivers_process_lives_takes_silence_for_a_pause(
    serving: Any, proxy: Any, fast: None, receive: Receive
) -> None:
    lives = threading.Event()
    lives.set()
    client = serving.client(port=proxy.port, driver_lives=lives.is_set)
    client.queue({"type": "join"})
    assert serving.next() == (0, {"type": "join"})
    proxy.hole()
    time.sleep(bounds.CONNECTION_LOST_AFTER() + 1.0)
    assert client.receive() == []
    lives.clear()
    with pytest.raises(ChannelClosed, match="nothing was received from the driver"):
        receive(client, lambda _: False)


def test_a_driver_that_stood_still_loses_no_agent(
    serving: Any, fast: None, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_still() -> None:
        # What an agent had sent meanwhile would be received before its silence is counted.
        serving.server._peers[0].connection.drop("cut")
        time.sleep(bounds.CONNECTION_LOST_AFTER() + bounds.CONNECTION_SILENCE())
        # After some looks at its agents. This one may need longer to come back.
        serving.server._loop.call_later(
            bounds.PING_INTERVAL, monkeypatch.setattr, bounds, "CONNECTION_LOST_AFTER", lambda: 20.0
        )

    client = serving.client(driver_lives=lambda: True)
    client.queue({"type": "join"})
    assert serving.next() == (0, {"type": "join"})
    # As one call of native code does that keeps the interpreter's lock, or Ctrl-Z.
    serving.server._call(stand_still)
    serving.server.send(0, {"type": "stop"})
    assert receive(client, lambda got: got) == [{"type": "stop"}]
    client.queue({"type": "bye"})
    seen: list[Any] = []
    serving.await_type("bye", seen)
    assert LOST not in [message["type"] for message in seen]


def test_a_channel_that_fails_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under gevent, where another loop runs in every thread."""

    def fail(*_: object) -> None:
        raise RuntimeError("Cannot run the event loop while another loop is running")

    monkeypatch.setattr(ChannelServer, "_sweep", fail)
    launcher = Launcher(1, store=tmp_path, start_timeout=60)
    with pytest.raises(EngineError, match="the driver's channel failed: RuntimeError: Cannot run the event loop while"):
        launcher.run(int)


def test_what_agents_sent_before_they_ended_is_read_before_their_end_is_used(serving: Any) -> None:
    assert serving.hears()
    (client,) = serving.clients
    serving.server._loop.call_soon_threadsafe(time.sleep, 1.0)
    # Meanwhile the agent says its last words and ends, and so its engine reports.
    client.queue({"type": "last"})
    seen: list[list[Message]] = []
    said = threading.Event()

    def note() -> None:
        seen.append([message for _, message in iter_queue(serving)])
        said.set()

    serving.server.when_alone(note)
    client.close(5.0)
    assert said.wait(20)
    assert [message["type"] for message in seen[0]] == ["last"]
