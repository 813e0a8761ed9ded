"""Lines and metrics of little hurry travel together: each delivery wakes the agent, the channel and the driver."""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import of_ranks

import rankzero.train as rt
from rankzero import Launcher, ResultError, bounds
from rankzero.agent import output
from rankzero.channel import messages
from rankzero.channel.messages import Decoder, Finished, encode
from rankzero.driver.recorder import Recorder
from rankzero.worker import control as controls
from rankzero.worker.control import Control

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
    assert of_ranks(line for lines in deliveries for line in lines) == [f"line {number}" for number in range(LINES)]
    # The first comes at once, and the last ones with the end of the rank.
    assert len(deliveries) <= lasted / bounds.DELIVERY_INTERVAL + 3


def test_a_rank_that_prints_much_never_waits_for_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    outbox: Any = type("Outbox", (), {"send_lines": lambda *_: None})()
    rank = output.RankOutput(0, outbox)
    rank.feed(b"few words\n")
    assert rank.pause > output.BRISK
    for _ in range(20):
        # 30 kB a second: no reason to look more often.
        clock[0] += bounds.DELIVERY_INTERVAL
        rank.feed(b"x" * int(30_000 * bounds.DELIVERY_INTERVAL))
        assert rank.pause > output.BRISK
    rank.feed(b"x" * output.QUIET_BYTES)
    assert rank.pause == output.BRISK
    for _ in range(5):
        # What the pipe holds each time the agent is back at it: little, since it comes at once.
        rank.feed(b"x" * (output.QUIET_BYTES // 4))
        assert rank.pause == output.BRISK


@pytest.fixture
def control() -> Iterator[tuple[Control, socket.socket]]:
    """A worker's end, and the agent's, which receives each delivery by itself."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(10)
    with mine:
        rank = Control(other.detach())
        yield rank, mine
        # What a failed test has left would find the socket closed some day, and end this process.
        rank.flush()


@pytest.fixture
def no_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first delivery nothing leaves because its time has come."""
    monkeypatch.setattr(controls, "next_delivery", lambda: time.monotonic() + 1000.0)


def row(number: int) -> str:
    return f'[{{"n":{number}}},0.0]'


def receive(agent: socket.socket) -> list[Any]:
    """The messages of one delivery: their types, and the numbers of reports for those that hold some."""
    found = [message for message, _ in Decoder().feed(agent.recv(8 << 20))]
    return [
        [row[0]["n"] for row in message.rows] if isinstance(message, messages.Metrics) else type(message).__name__
        for message in found
    ]


def test_reports_travel_together_and_take_the_outcome_with_them(
    control: tuple[Control, socket.socket], no_delivery: None
) -> None:
    rank, agent = control
    rank.report(row(0))
    assert receive(agent) == [[0]]
    for number in (1, 2, 3):
        rank.report(row(number))
    assert select.select([agent], [], [], 0.2)[0] == [], "a report did not wait"
    rank.send(Finished(time=0.0))
    assert receive(agent) == [[1, 2, 3], "Finished"]


def test_reports_leave_when_their_time_has_come(control: tuple[Control, socket.socket]) -> None:
    rank, agent = control
    rank.report(row(0))
    assert receive(agent) == [[0]]
    rank.report(row(1))
    assert receive(agent) == [[1]]


def test_go_may_overtake_the_start_of_an_agent_that_still_fetches_files(control: tuple[Control, socket.socket]) -> None:
    """The driver tells all agents when rank 0 is ready: one of them may be slow to get what its ranks need."""
    rank, agent = control
    go, start = messages.Go(["host"], 1, one_host=False), messages.Start("run", "", shared=True, scratch="")
    lost = messages.NotCommitted(0)
    for message in (go, lost, start):
        agent.send(encode(message))
    assert rank.expect(messages.Start) == start
    assert rank.expect(messages.Go) == go
    assert rank.expect(messages.NotCommitted) == lost


def test_what_is_between_reports_stays_there(control: tuple[Control, socket.socket], no_delivery: None) -> None:
    rank, agent = control
    rank.report(row(0))
    rank.flush()
    rank.report(row(1))
    rank.report(row(2))
    rank._put(encode(messages.PartFailed(0)), patient=True)
    rank.report(row(3))
    rank.flush()
    agent.setblocking(False)
    assert [receive(agent), receive(agent)] == [[[0]], [[1, 2], "PartFailed", [3]]]


def test_a_report_that_is_large_does_not_wait(control: tuple[Control, socket.socket], no_delivery: None) -> None:
    rank, agent = control
    rank.report(row(0))
    assert receive(agent) == [[0]]
    rank.report(row(1))
    rank.report(f'[{{"n":2,"text":"{"x" * controls.LARGE_REPORT}"}},0.0]')
    assert receive(agent) == [[1, 2]]


def test_reports_of_many_threads_and_of_signal_handlers_all_arrive(control: tuple[Control, socket.socket]) -> None:
    """A handler may interrupt the very call that it makes itself."""
    rank, agent = control
    count, threads = 2000, 3
    handled = []

    def interrupt(*_: object) -> None:
        handled.append(rank.report(row(-1)))

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        others = [threading.Thread(target=lambda: [rank.report(row(n)) for n in range(count)]) for _ in range(threads)]
        for thread in others:
            thread.start()
        for number in range(count):
            rank.report(row(number))
        for thread in others:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    expected = (threads + 1) * count + len(handled)
    received: list[int] = []
    while len(received) < expected:
        received += [number for rows in receive(agent) for number in rows]
    assert sorted(received) == sorted([-1] * len(handled) + [*range(count)] * (threads + 1))


def test_a_report_too_large_for_a_message_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="the limit is 1048576"):
        rt.report({"text": "x" * (1 << 20)})


@pytest.fixture
def listening(
    control: tuple[Control, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Control, socket.socket]]:
    """The same, with the thread that listens: the end of the agent, which ends a rank, ends that thread alone."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    rank, agent = control
    before = set(threading.enumerate())
    rank.listen(lambda message: None)
    (thread,) = [new for new in set(threading.enumerate()) - before if new.name == "rankzero-control"]
    yield rank, agent
    rank.flush()
    agent.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_each_thread_that_waits_for_a_file_learns_that_it_cannot_be_had(
    listening: tuple[Control, socket.socket],
) -> None:
    rank, agent = listening
    errors: list[str] = []

    def fetch() -> None:
        try:
            rank.fetch("part")
        except ResultError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=fetch, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    asked: list[Any] = []
    while len(asked) < 2:
        asked += receive(agent)
    # One answer to both: it is there before the second thread looks.
    agent.send(encode(messages.Fetched("part", "", "gone")))
    for thread in threads:
        thread.join(10)
    assert errors == ["part cannot be had from the driver: gone"] * 2
    # The next request asks the agent again.
    again = threading.Thread(target=fetch, daemon=True)
    again.start()
    assert receive(agent) == ["Fetch"]
    agent.send(encode(messages.Fetched("part", "/here", None)))
    again.join(10)
    assert not again.is_alive()
    assert len(errors) == 2
