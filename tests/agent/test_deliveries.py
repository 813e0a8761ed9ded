"""Lines and metrics of little hurry travel together: each delivery wakes the agent, the channel and the driver."""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rankzero import Launcher
from rankzero.agent import output, pace
from rankzero.agent.control import Control
from rankzero.channel import frames
from rankzero.record import Recorder

LINES = 100
PAUSE = 0.01


@pytest.fixture
def deliveries(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The lines of each message that the driver of a run in this process takes."""
    taken: list[list[str]] = []
    log = Recorder.log

    def spying(recorder: Recorder, rank: int, lines: list[str]) -> None:
        taken.append(lines)
        log(recorder, rank, lines)

    monkeypatch.setattr(Recorder, "log", spying)
    return taken


def test_lines_of_a_quiet_rank_travel_together(launcher: Launcher, deliveries: list[list[str]]) -> None:
    def train() -> None:
        for number in range(LINES):
            print(f"line {number}")
            time.sleep(PAUSE)

    began = time.monotonic()
    Launcher(1, store=launcher.store).run(train)
    lasted = time.monotonic() - began
    assert [line for lines in deliveries for line in lines] == [f"line {number}" for number in range(LINES)]
    # The first comes at once, and the last ones with the end of the rank.
    assert len(deliveries) <= lasted / pace.DELIVERY_INTERVAL + 3


def test_a_rank_that_prints_much_never_waits_for_the_interval() -> None:
    client: Any = type("Client", (), {"bulk_bytes": 0, "queue": lambda *_, **__: None})()
    rank = output.RankOutput(0, client, os.devnull)
    rank.feed(b"few words\n")
    assert rank.is_quiet
    rank.feed(b"x" * output.QUIET_BYTES)
    assert not rank.is_quiet
    for _ in range(5):
        # What the pipe holds each time the agent is back at it: little, since it comes at once.
        rank.feed(b"x" * (output.QUIET_BYTES // 4))
        assert not rank.is_quiet


@pytest.fixture
def control() -> Iterator[tuple[Control, socket.socket]]:
    """A worker's end, and the agent's, which receives each delivery by itself."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(10)
    with mine:
        yield Control(other.detach()), mine


def receive(agent: socket.socket) -> list[str]:
    """The types of the messages of one delivery, a metric's once for each report."""
    decoder = frames.Decoder()
    decoder.trust(None)
    decoder.feed(agent.recv(frames.CHUNK))
    messages = [message for message in decoder if isinstance(message, dict)]
    return [message["type"] for message in messages for _ in message.get("rows", [None])]


def test_metrics_travel_together_and_take_the_outcome_with_them(
    control: tuple[Control, socket.socket],
) -> None:
    rank, agent = control
    rank.report({"loss": 1.0}, 0.0)
    assert receive(agent) == ["metric"]
    for _ in range(3):
        rank.report({"loss": 1.0}, 0.0)
    rank.send({"type": "commit"})
    received = receive(agent)
    while received[-1] != "commit":
        # This process was held up between two of them for longer than metrics wait.
        received += receive(agent)
    assert received == ["metric"] * 3 + ["commit"]


def test_flushing_does_not_wait_for_metrics_to_be_many(control: tuple[Control, socket.socket]) -> None:
    rank, agent = control
    for _ in range(2):
        rank.report({}, 0.0)
    rank.flush()
    agent.setblocking(False)
    received = []
    while len(received) < 2:
        received += receive(agent)
    assert received == ["metric", "metric"]
