"""Control messages overtake bulk, and a driver that cannot keep up slows bulk only."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero.channel import frames
from rankzero.channel.frames import Message

LINE = "x" * 100_000


def bulk_taken(seen: list[Message]) -> int:
    return sum(len(message["text"]) for message in seen if message["type"] == "log")


def test_a_control_message_overtakes_bulk(serving: Any) -> None:
    client = serving.client()
    count = (100 << 20) // len(LINE)
    for number in range(count):
        client.queue({"type": "log", "n": number, "text": LINE}, bulk=True)
    client.queue({"type": "failure"})
    seen: list[Message] = []
    serving.await_type("failure", seen)
    while len(seen) < count:
        seen.append(serving.next()[1])
    assert [message["n"] for message in seen] == list(range(count))


def test_a_driver_that_cannot_take_more_slows_bulk_and_nothing_else(serve: Any, tmp_path: Path) -> None:
    room = threading.Event()
    serving = serve(can_take=room.is_set)
    path = tmp_path / "value"
    path.write_bytes(b"v" * (4 << 20))
    client = serving.client()
    for number in range(300):
        client.queue({"type": "log", "n": number, "text": LINE}, bulk=True)
    client.send_file("value", str(path), {"type": "commit"})
    seen: list[Message] = []
    for number in range(20):
        client.queue({"type": "control", "n": number})
        assert serving.await_type("control", seen)["n"] == number
        time.sleep(0.02)
    assert 0 < bulk_taken(seen) <= frames.BULK_WINDOW + len(LINE)
    assert client.bulk_bytes > 15 << 20
    room.set()
    serving.await_type("commit", seen)
    while len([message for message in seen if message["type"] == "log"]) < 300:
        seen.append(serving.next()[1])
    assert [message["n"] for message in seen if message["type"] == "log"] == list(range(300))
    client.close(10.0)
    assert client.bulk_bytes == 0


def test_logs_and_files_share_the_way(serve: Any, tmp_path: Path) -> None:
    room = threading.Event()
    serving = serve(can_take=room.is_set)
    path = tmp_path / "value"
    path.write_bytes(b"v" * (30 << 20))
    client = serving.client()
    client.send_file("value", str(path), {"type": "commit"})
    for number in range(300):
        client.queue({"type": "log", "n": number, "text": LINE}, bulk=True)
    # The file has not gone before the lines are there.
    room.set()
    seen: list[Message] = []
    serving.await_type("commit", seen)
    # Neither waited for the other's end.
    assert len([message for message in seen if message["type"] == "log"]) > 100


@pytest.mark.parametrize("broken", [True, False])
def test_a_question_that_fails_counts_as_yes(serve: Any, broken: bool) -> None:
    def can_take() -> bool:
        if broken:
            raise RuntimeError("the driver's own error")
        return True

    serving = serve(can_take=can_take)
    client = serving.client()
    for number in range(200):
        client.queue({"type": "log", "n": number, "text": LINE}, bulk=True)
    for number in range(200):
        assert serving.next()[1]["n"] == number


def test_a_client_holds_no_file_in_memory(serve: Any, tmp_path: Path, receive: Callable[..., list[Message]]) -> None:
    room = threading.Event()
    serving = serve(can_take=room.is_set)
    path = tmp_path / "value"
    path.write_bytes(b"v" * (40 << 20))
    client = serving.client()
    client.send_file("value", str(path), {"type": "commit"})
    client.queue({"type": "control"})
    serving.await_type("control")
    # What was not read yet is read later: it is the new end that arrives.
    until(lambda: serving.server._peers[0].withheld >= frames.BULK_WINDOW, 20.0, "a full window")
    with open(path, "r+b") as file:
        file.seek(-10, 2)
        file.write(b"0123456789")
    room.set()
    uploaded = serving.await_type("uploaded")
    assert Path(uploaded["path"]).read_bytes().endswith(b"0123456789")
