"""What ranks print and report arrives, in few deliveries: each wakes the agent, the channel and the driver."""

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find, is_alive, of_ranks, until

import rankzero.train as rt
from rankzero import Launcher, ResultError, WorkerFailedError, bounds
from rankzero.channel import messages
from rankzero.channel.messages import Decoder, encode
from rankzero.driver.recorder import Recorder
from rankzero.engines.local import LocalSession
from rankzero.train.context import await_checkpoint
from rankzero.worker.control import Control

LINES = 100
COUNT = 1000  # Reports of each thread
PAGE = mmap.PAGESIZE // 512  # Blocks, of 512 bytes each
PAUSE = 0.01
WAIT = 60.0


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


def test_a_cancel_behind_a_success_ends_the_delivery_of_its_lines(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, rank = Recorder.log, tmp_path / "rank"
    monkeypatch.setattr(Recorder, "log", lambda *given: (time.sleep(PAUSE * 20), log(*given))[1])

    def train(note: str) -> None:
        Path(note).write_text(f"{os.getppid()} {os.getpid()}")
        for _ in range(400):
            os.write(1, (b"x" * 1023 + b"\n") * 256)

    launcher = launcher.options(num_processes=1, run_id="much", stop_grace=WAIT * 10)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(launcher.run, train, str(rank))
        handle = until(lambda: find(launcher), WAIT, "the run")
        agent, pid = until(lambda: handle.status().result and map(int, rank.read_text().split()), WAIT, "the value")
        until(lambda: not is_alive(pid), WAIT, "the rank's end")
        handle.cancel()
        # Each signal is a request to stop, too, and gives no more time.
        until(lambda: (is_alive(agent) and os.kill(agent, signal.SIGTERM)) or running.done(), WAIT, "the end")
        assert running.result(WAIT) is None
    assert len(list(handle.logs())) < 400 * 256


def test_a_file_that_the_driver_cannot_read_either_is_fetched_once(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, payloads = LocalSession.launch, Path(str(launcher.store)).rglob("payload.pkl")
    monkeypatch.setattr(LocalSession, "launch", lambda *given: (next(payloads).unlink(), launch(*given))[1])
    with pytest.raises(ResultError, match="^payload.pkl cannot be had from the driver: .*FileNotFoundError"):
        launcher.options(max_restarts=1).run(os.getpid)


def test_reports_of_threads_and_of_signal_handlers_all_arrive_and_leave_no_memory(launcher: Launcher) -> None:
    """A handler may interrupt the very call that it makes itself."""

    def train() -> tuple[int, set[int]]:
        handled, reports = [], [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        (reports,) = [path for path in reports if "memfd:rankzero" in os.path.realpath(path)]

        def report(name: str, number: int) -> None:
            rt.report({name: number, "text": "x" * (number * 37 % 300)})

        def blocks() -> int:
            """The blocks that the file takes once the agent has read it: those of its last page, unless it is full."""
            for _ in range(300):
                if (found := os.stat(reports).st_blocks) <= PAGE:
                    break
                time.sleep(0.1)
            return found

        signal.signal(signal.SIGPROF, lambda *_: handled.append(report("handled", len(handled))))
        signal.setitimer(signal.ITIMER_PROF, 0.02, 0.02)
        threads = [threading.Thread(target=lambda: [report("n", n) for n in range(COUNT)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(COUNT):
            report("n", number)
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        left = {blocks()}
        for _ in range(3):
            rt.report({"text": "x" * 5000})
            left.add(blocks())
        return len(handled), left

    launcher = launcher.options(num_processes=1, run_id="threads")
    count, left = launcher.run(train)
    handle = find(launcher)
    assert handle
    rows = handle.metrics()
    assert sorted(row["n"] for row in rows if "n" in row) == sorted([*range(COUNT)] * 4)
    assert sorted(row["handled"] for row in rows if "handled" in row) == list(range(count))
    assert max(left) <= PAGE


def test_a_checkpoint_overtakes_no_report_and_the_last_ones_before_a_kill_arrive(launcher: Launcher) -> None:
    def train() -> None:
        rt.report({"number": 0}, checkpoint={})
        await_checkpoint()
        for number in range(1, LINES):
            rt.report({"number": number})
        os.kill(os.getpid(), signal.SIGKILL)

    launcher = launcher.options(num_processes=1, run_id="killed")
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        launcher.run(train)
    handle = find(launcher)
    assert handle
    kinds = [event["type"] for event in handle.events()]
    assert kinds.index("metric") < kinds.index("checkpoint")
    assert [row["number"] for row in handle.metrics()] == list(range(LINES))


@pytest.fixture
def control() -> Iterator[tuple[Control, socket.socket]]:
    """A worker's end, and the agent's, which receives each message by itself."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(10)
    with mine:
        rank = Control(other.detach(), os.open(os.devnull, os.O_WRONLY))
        yield rank, mine
        # What a failed test has left would find the socket closed some day, and end this process.
        rank.flush()


def receive(agent: socket.socket) -> list[str]:
    """The types of the messages that arrive together."""
    return [type(message).__name__ for message, _ in Decoder().feed(agent.recv(8 << 20))]


def test_go_may_overtake_the_start_of_an_agent_that_still_fetches_files(control: tuple[Control, socket.socket]) -> None:
    """The driver tells all agents when rank 0 is ready: one of them may be slow to get what its ranks need."""
    rank, agent = control
    go, start = messages.Go(["host"], 1, one_host=False), messages.Start("run", "", shared=True, scratch="")
    lost = messages.Lost(0)
    for message in (go, lost, start):
        agent.send(encode(message))
    assert rank.expect(messages.Start) == start
    assert rank.expect(messages.Go) == go
    assert rank.expect(messages.Lost) == lost


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
    agent.send(encode(messages.Transferred("part", "", "gone")))
    for thread in threads:
        thread.join(10)
    assert errors == ["part cannot be had from the driver: gone"] * 2
    # The next request asks the agent again.
    again = threading.Thread(target=fetch, daemon=True)
    again.start()
    assert receive(agent) == ["Transfer"]
    agent.send(encode(messages.Transferred("part", "/here", None)))
    again.join(10)
    assert not again.is_alive()
    assert len(errors) == 2
