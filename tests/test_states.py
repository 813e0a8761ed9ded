"""The states of an attempt: the table in the docstring of `rankzero.driver.states` is what the code does."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import EngineError, RunCancelledError, StartTimeoutError, WorkerFailedError, bounds
from rankzero.channel import messages
from rankzero.driver.attempt import Attempt
from rankzero.driver.launched import TICK_OF_TRAINING, Final, Starting
from rankzero.driver.places import Placed, Places, Plan
from rankzero.driver.recorder import Recorder
from rankzero.driver.states import State, step
from rankzero.driver.watch import Inbox, Mailbox, Received, Watch
from rankzero.engines.base import AgentGroup, Engine
from rankzero.engines.local import LocalSession
from rankzero.job import Job
from rankzero.masking import Mask
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.status import RunStatus

RANKS = 2
WAIT = 30.0
LATER = 1e6
"""Seconds after which every deadline has passed."""


def rows() -> list[tuple[str, ...]]:
    """The rows of the table: state, phase, event, next state, effect."""
    lines = (sys.modules[State.__module__].__doc__ or "").splitlines()
    rule = next(line for line in lines if line.startswith("==="))
    begins = [found.start() for found in re.finditer("=+", rule)]
    first, last = [number for number, line in enumerate(lines) if line == rule][1:]
    spans = list(zip(begins, [*begins[1:], None], strict=True))
    return [tuple(line[begin:end].strip() for begin, end in spans) for line in lines[first + 1 : last]]


ROWS = rows()


class Group(AgentGroup):
    """Agents that do what the test says."""

    def __init__(self, on_end: Callable[[BaseException | None], None]) -> None:
        super().__init__()
        self.on_end = on_end
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._ended.set()

    def explain(self, error: BaseException) -> EngineError:
        return EngineError(str(error))


class Session(LocalSession):
    """Slots and agents of the test."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.found = job.num_tasks
        self.group: Group | None = None

    def slots(self) -> int:
        return self.found

    def is_usable(self) -> bool:
        return True

    def launch(self, num_tasks: int, config: Any, on_end: Callable[[BaseException | None], None]) -> Group:
        self.group = Group(on_end)
        return self.group


class SlowEngine(Engine):
    """Opens a session when the test lets it."""

    def __init__(self) -> None:
        self.may_open = threading.Event()

    def check(self, job: Job) -> None: ...

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    can_detach = prefers_own_process = False

    def open(self, job: Job) -> Session:
        self.may_open.wait(WAIT)
        return Session(job)


class Server:
    """The driver's end of a channel without agents."""

    failure: BaseException | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: list[messages.Message] = []

    def start(self, listener: Any) -> int:
        listener.close()
        return 1

    def send(self, task: int, wire: dict[str, Any]) -> None:
        self.sent.append(messages.decode(wire))

    def broadcast(self, wire: dict[str, Any]) -> None:
        self.send(0, wire)

    def when_alone(self, act: Callable[[], None]) -> None:
        """Everything is read."""
        act()

    def close(self) -> None: ...


class Stage:
    """One attempt of two ranks, its driver's surroundings, and what agents say."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.setattr("rankzero.driver.attempt.ChannelServer", Server)
        monkeypatch.setattr("rankzero.driver.places.Tables", Computed)
        settings = {"run_id": "run", "name": "train", "num_processes": RANKS, "processes_per_task": 1}
        settings |= {"use_gpu": False, "backend": None, "timeout": None, "start_timeout": WAIT, "engine": {}}
        self.job = Job(**{**settings, **options})
        self.own, self.inbox = Submission(RunDirectory(str(place / "run")), self.job), Inbox()
        self.own.write_files({})
        assert self.own.run.claim(self.job)
        assert self.own.claim_driver()
        self.recorder = Recorder(self.own, Mask())
        self.watch = Watch(self.own, self.recorder, self.inbox, leased=False)
        self.mailbox = self.inbox.renew()
        self.session = Session(self.job)
        self.engine = SlowEngine()
        self.places = Places(self.engine, self.inbox)
        self.state: State = State()
        self.now = 0.0

    # -- the surroundings ----------------------------------------------------------------------

    def plan(self) -> Plan:
        deadline = time.monotonic() + WAIT
        return Plan(self.own, self.job, self.places, self.recorder, self.watch.check, {}, deadline)

    def begin(self) -> None:
        placed = Placed(self.plan(), self.session, RANKS)
        self.attempt = Attempt(self.own, 0, placed, self.recorder, self.mailbox, self.watch, {}, None)
        self.state = Starting(self.attempt)

    @property
    def server(self) -> Server:
        server = self.attempt._server
        assert isinstance(server, Server)
        return server

    @property
    def group(self) -> Group:
        assert self.session.group
        return self.session.group

    def say(self, *spoken: messages.Message, rank: int | None = None) -> None:
        for message in spoken:
            self.mailbox.put(0, messages.encode(message, rank))

    def step(self) -> None:
        self.state = step(self.state, self.mailbox, 0.0, lambda: time.monotonic() + self.now)

    def until(self, name: str) -> None:
        """Steps until a state of this class."""
        deadline = time.monotonic() + WAIT
        while self.name != name:
            assert time.monotonic() < deadline, f"it stays in {self.name}"
            self.step()

    @property
    def name(self) -> str:
        return type(self.state).__name__

    # -- what happens --------------------------------------------------------------------------

    def join(self) -> None:
        self.say(messages.Join("here", "here", "here", 1, self.job.python, [], RANKS))

    def start(self) -> None:
        self.begin()
        self.join()
        for rank in range(RANKS):
            self.say(messages.Ready("2.0"), rank=rank)
        self.say(messages.Rendezvous(1), rank=0)
        self.until("Running")

    def finish(self, *, by_value: bool = True) -> None:
        path = Path(self.own.path("result", "value-0.json"))
        path.write_text("7")
        result: dict[str, Any] = {"format": "json", "size": 1, "digest": "0" * 64, "path": str(path), "summary": {}}
        if by_value:
            result["value"] = 7
        for rank in range(RANKS):
            self.say(messages.Returned(0.0), messages.Finished(0.0, result if rank == 0 else None), rank=rank)

    def fail_rank(self) -> None:
        self.say(messages.Failed(0.0, exception_type="ValueError", message="bad", exit_code=1), rank=1)

    def succeed(self) -> None:
        """Goes on until the ranks leave after a success."""
        self.start()
        self.finish()
        self.until("Leaving")

    def lose(self) -> None:
        """Goes on until the ranks leave after an error."""
        self.start()
        self.fail_rank()
        self.until("Leaving")

    def store(self) -> None:
        """Goes on until the store is awaited, in which something is still under way."""
        self.attempt.committer.submit(functools.partial(time.sleep, 0.05))
        self.group.on_end(None)
        self.until("Storing")

    def cancel(self) -> None:
        self.inbox.interrupt("the test says so")


def opening(stage: Stage) -> None:
    stage.state = stage.plan().state()
    stage.step()


def opened(stage: Stage) -> None:
    opening(stage)
    stage.engine.may_open.set()
    wait([stage.state._reply], WAIT)  # type: ignore[attr-defined]


def reading(stage: Stage) -> None:
    stage.places.session = stage.session
    stage.state = stage.plan().state()
    wait([stage.state._reply], WAIT)  # type: ignore[attr-defined]


class Computed:
    """Tables that are computed at once."""

    def __init__(self, _own: Submission, job: Job, _session: Any) -> None:
        self._job = job

    def read(self, say: Callable[[str], None]) -> Job:
        say("3 rows")
        return replace(self._job, queries={})


def waiting(stage: Stage) -> None:
    stage.places.session = stage.session
    stage.state = stage.plan().state()
    wait([stage.state._reply], WAIT)  # type: ignore[attr-defined]


def too_few(stage: Stage) -> None:
    stage.session.found = 1
    waiting(stage)


def late(before: Callable[[Stage], object]) -> Callable[[Stage], None]:
    """What comes after a moment, and then nothing until all deadlines have passed."""

    def act(stage: Stage) -> None:
        before(stage)
        stage.now = LATER

    return act


def done(*acts: Callable[[Stage], object]) -> Callable[[Stage], None]:
    """What comes one after the other; the last act is the event."""

    def act(stage: Stage) -> None:
        for each in acts:
            each(stage)

    return act


def ready(stage: Stage) -> None:
    for rank in range(RANKS):
        stage.say(messages.Ready("2.0"), rank=rank)


def hang(stage: Stage) -> None:
    stage.step()
    for rank in range(RANKS):
        stage.say(messages.Stack("stands"), rank=rank)
    stage.now = bounds.MEET_TIMEOUT() + 100.0
    stage.step()
    stage.now += 10.0


EVENTS: dict[tuple[str, str], Callable[[Stage], None]] = {
    ("Opening", "the session is open"): opened,
    ("Opening", "the session is open, the job has queries"): opened,
    ("Reading", "the tables are computed"): reading,
    ("Opening", "no reply until the deadline"): late(opening),
    ("WaitingForSlots", "enough slots are reserved"): waiting,
    ("WaitingForSlots", "too few slots"): too_few,
    ("WaitingForSlots", "too few slots at the deadline"): late(too_few),
    ("Starting", "the last agent joins"): done(Stage.begin, Stage.join),
    ("Starting", "rank 0 binds the rendezvous"): done(
        Stage.begin, Stage.join, Stage.step, lambda stage: stage.say(messages.Rendezvous(1), rank=0)
    ),
    ("Starting", "the last rank is ready"): done(
        Stage.begin, Stage.join, lambda stage: stage.say(messages.Rendezvous(1), rank=0), Stage.step, ready
    ),
    ("Starting", "the verdict is an error"): done(Stage.begin, Stage.join, Stage.step, Stage.fail_rank),
    ("Starting", "a rank is not ready at the deadline"): late(Stage.begin),
    ("Starting", "the run must end"): done(Stage.begin, Stage.cancel),
    ("Running", "every rank has finished"): done(Stage.start, Stage.finish),
    ("Running", "the verdict is an error"): done(Stage.start, Stage.fail_rank),
    ("Running", "the run must end"): done(Stage.start, Stage.cancel),
    ("Running", "the run takes longer than its timeout"): late(Stage.start),
    ("Running", "no rank makes progress"): done(Stage.start, hang),
    ("Recording", "the record is durable"): done(
        Stage.start,
        Stage.finish,
        lambda stage: stage.until("Recording"),
        lambda stage: wait([stage.state._recorded]),  # type: ignore[attr-defined]
    ),
    ("Recording", "the run must end"): done(
        Stage.start, Stage.finish, lambda stage: stage.until("Recording"), Stage.cancel
    ),
    ("Leaving", "every rank is over"): done(Stage.lose, lambda stage: stage.say(messages.Exited(), rank=0)),
    ("Leaving", "an agent joins after an error"): done(Stage.begin, Stage.cancel, Stage.step, Stage.join),
    ("Leaving", "the agents have ended"): done(Stage.succeed, lambda stage: stage.group.on_end(None)),
    ("Leaving", "the deadline"): late(Stage.succeed),
    ("Leaving", "an agent is lost"): done(Stage.succeed, lambda stage: stage.say(messages.Lost())),
    ("Leaving", "the run must end after its success"): done(Stage.succeed, Stage.cancel),
    ("Storing", "everything is stored after a success"): done(Stage.succeed, Stage.store, lambda _: time.sleep(0.2)),
    ("Storing", "everything is stored after an error"): done(Stage.lose, Stage.store, lambda _: time.sleep(0.2)),
}
"""What makes each event of the table happen to a new attempt."""

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("Opening", "the session is open, the job has queries"): {"queries": {"rows": "table"}},
    ("Reading", "the tables are computed"): {"queries": {"rows": "table"}},
    ("Running", "the run takes longer than its timeout"): {"timeout": 100.0},
    ("Running", "no rank makes progress"): {"hang_timeout": 5.0},
}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**options: Any) -> Stage:
        made.append(Stage(tmp_path, monkeypatch, **options))
        return made[0]

    yield make
    for each in made:
        each.engine.may_open.set()
        each.places.close()
        each.recorder.finish(state="cancelled")


def subclasses(kind: type) -> set[str]:
    own = {each.__name__ for each in kind.__subclasses__()}
    return own.union(*(subclasses(each) for each in kind.__subclasses__()))


def test_every_state_has_rows_in_the_table_and_every_row_is_tested() -> None:
    assert {(state, event) for state, _, event, _, _ in ROWS} == set(EVENTS)
    ends = {"Placed", "Final"}
    assert {state for state, *_ in ROWS} == {name for name in subclasses(State) if name[0] != "_"} - ends
    assert {after for _, _, _, after, _ in ROWS} > ends


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[2]}")
def test_each_row_of_the_table_is_what_the_code_does(row: tuple[str, ...], stage: Callable[..., Stage]) -> None:
    state, phase, event, after, effect = row
    scene = stage(**OPTIONS.get((state, event), {}))
    EVENTS[state, event](scene)
    assert (scene.name, scene.state.phase) == (state, phase)
    before = len(scene.server.sent) if hasattr(scene, "attempt") else 0
    if after == "error":
        with pytest.raises((StartTimeoutError, RunCancelledError)):
            scene.step()
        return
    scene.step()
    while scene.name == state != after:
        # The store is slow.
        scene.step()
    assert scene.name == after
    if sent := re.match(r"sends (\w+)", effect):
        assert sent[1] in [type(message).__name__ for message in scene.server.sent[before:]]
    if "cancels" in effect:
        assert scene.group.is_cancelled


def test_an_error_before_the_agents_start_is_raised(stage: Callable[..., Stage]) -> None:
    scene = stage()
    opening(scene)
    scene.cancel()
    with pytest.raises(RunCancelledError):
        scene.step()


def test_a_success_stands_whatever_fails_later(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = stage()
    scene.succeed()
    monkeypatch.setattr(scene.attempt, "poll", lambda: pytest.fail("something broke"))
    scene.step()
    assert isinstance(scene.state, Final)
    assert scene.state.verdict.success


def test_a_value_that_is_stored_after_an_error_is_a_success(stage: Callable[..., Stage]) -> None:
    scene = stage()
    scene.start()
    for rank in range(RANKS):
        scene.say(messages.Returned(0.0), rank=rank)
    scene.step()
    scene.cancel()
    scene.step()
    assert scene.name == "Leaving"
    scene.finish()
    scene.store()
    scene.until("Final")
    assert isinstance(scene.state, Final)
    assert scene.state.verdict.success


def test_a_value_that_is_stored_at_the_last_moment_is_a_success(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored between the look at what has been stored and the look at what is under way."""
    scene, may_store = stage(), threading.Event()
    scene.start()
    for rank in range(RANKS):
        scene.say(messages.Returned(0.0), rank=rank)
    scene.cancel()
    scene.until("Leaving")
    scene.attempt.committer.submit(functools.partial(may_store.wait, WAIT))
    scene.finish(by_value=False)
    scene.group.on_end(None)
    scene.until("Storing")
    may_store.set()
    storing = scene.attempt.storage._storing
    assert storing
    is_over = threading.Event()
    # Called behind the callback that wakes the driver.
    storing.add_done_callback(lambda _: is_over.set())
    assert is_over.wait(WAIT)
    for _ in scene.mailbox.receive(0.0):
        pass
    poll, looks = scene.attempt.poll, [lambda: None]
    monkeypatch.setattr(scene.attempt, "poll", lambda: (looks.pop() if looks else poll)())
    scene.until("Final")
    assert not looks
    assert isinstance(scene.state, Final)
    assert scene.state.verdict.success


def test_a_failure_that_is_reported_while_ranks_are_stopped_is_the_cause_of_the_consequences(
    stage: Callable[..., Stage],
) -> None:
    scene = stage()
    scene.start()
    scene.say(messages.Failed(0.0, exception_type="RuntimeError", message="broken", collateral=True), rank=0)
    scene.step()
    scene.now = bounds.CAUSE_WINDOW()
    scene.step()
    assert scene.name == "Running"
    for rank in range(RANKS):
        scene.say(messages.Stack("stands"), rank=rank)
    scene.step()
    assert scene.name == "Leaving"
    scene.say(messages.Failed(0.0, exception_type="KeyError", message="the cause"), rank=1)
    scene.store()
    scene.until("Final")
    assert isinstance(scene.state, Final)
    error = scene.state.verdict.error
    assert isinstance(error, WorkerFailedError)
    assert (error.rank, error.exception_type, error.cause) == (1, "KeyError", None)
    assert "rank 0: RuntimeError: broken (a consequence)" in str(error)


def test_what_an_agent_said_before_the_engine_reports_its_end_is_heard_first(stage: Callable[..., Stage]) -> None:
    scene = stage()
    scene.start()
    scene.say(messages.Leaving("it got SIGTERM", "preempted"))
    scene.group.on_end(RuntimeError("the task has ended"))
    scene.until("Leaving")
    scene.until("Final")
    assert isinstance(scene.state, Final)
    assert "it got SIGTERM" in str(scene.state.verdict.error)


@pytest.mark.parametrize("spoken", [messages.Returned(0.0), messages.Failed(0.0, message="bad", collateral=True)])
def test_ticks_are_rare_only_while_every_rank_trains(stage: Callable[..., Stage], spoken: messages.Message) -> None:
    scene = stage()
    scene.start()
    assert scene.state.pause == TICK_OF_TRAINING
    scene.say(spoken, rank=1)
    scene.step()
    assert scene.name == "Running"
    assert scene.state.pause == bounds.TICK


def test_the_phase_is_in_the_status_that_readers_get(stage: Callable[..., Stage]) -> None:
    scene = stage()
    scene.start()
    scene.finish()
    scene.until("Recording")
    scene.until("Leaving")
    assert scene.own.status().phase == "running", "the ranks had started"
    scene.recorder.note_phase(scene.state.phase)
    scene.group.on_end(None)
    scene.until("Final")
    scene.recorder.update(checkpoint=None)
    until(lambda: scene.own.status().phase == "ending", WAIT, "the next write")


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (RunStatus(state="pending"), "pending"),
        (RunStatus(state="starting", phase="starting"), "starting"),
        (RunStatus(state="starting", phase="waiting for slots"), "starting (waiting for slots)"),
        (RunStatus(state="running", phase="ending"), "running (ending)"),
        (RunStatus(state="failed", phase="ending"), "failed"),
    ],
)
def test_a_state_is_shown_with_its_phase_where_that_says_more(status: RunStatus, shown: str) -> None:
    assert status.shown == shown


def test_a_rank_that_fails_while_its_agent_leaves_is_no_cause_and_its_lines_are_short(
    stage: Callable[..., Stage],
) -> None:
    scene = stage()
    scene.start()
    scene.say(messages.Leaving("it got SIGTERM", "preempted"))
    scene.say(messages.Failed(0.0, message="no", log_tail=["x" * 2 * bounds.LOG_TAIL_WIDTH]), rank=1)
    scene.step()
    [failure] = scene.attempt.facts.failures
    assert (failure.rank, failure.host, failure.placed_on) == (1, "here", "here")
    assert failure.report.collateral
    assert len(failure.report.log_tail[0]) == bounds.LOG_TAIL_WIDTH


def test_a_driver_that_stood_still_receives_what_came_meanwhile_before_its_time_limits_end() -> None:
    order: list[str] = []

    class Noting(State):
        phase = "running"

        def on(self, received: Received) -> State:
            order.append("message")
            return self

        def tick(self, now: float) -> State:
            order.append("tick")
            return self

    class Late(Mailbox):
        """Its channel's thread gets a processor once the driver waits, and wakes it first."""

        def receive(self, timeout: float) -> Iterator[Received]:
            if timeout:
                if not order:
                    self.put(0, {"type": "exited", "local_rank": 0})
                elif len(order) == 1:
                    self.put(0, {"type": "exited", "local_rank": 1})
            return super().receive(timeout)

    now = 0.0

    def clock() -> float:
        nonlocal now
        now += bounds.TICK / 4 if now else 5.0
        return now - 5.0 if now == 5.0 else now

    step(Noting(), Late(), 0.0, clock)
    assert order == ["message", "message", "tick"]
