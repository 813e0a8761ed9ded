"""The life of an attempt whose agents are scripts: they speak on the real channel, to the driver of a real run."""

import asyncio
import platform
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rankzero import EngineError, Launcher, LocalEngine, RankZeroError, RunCancelledError, RunHandle, WorkerFailedError
from rankzero.channel import messages
from rankzero.channel.connection import Connection, Driver
from rankzero.channel.messages import Bye, End, Failed, Finished, Join, Message, Reached, Stop
from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd
from rankzero.engines.local import LocalSession
from rankzero.job import Job
from rankzero.values import formats

WAIT = 60.0


class Agent:
    """The agent of one rank, which says what its script says."""

    def __init__(self, connection: Connection, folder: Path, task: int) -> None:
        self.connection = connection
        self.task = task
        self._folder = folder
        self._received = aiter(connection.messages())

    def send(self, *sent: Message) -> None:
        """Sends messages of the rank."""
        for message in sent:
            self.connection.send(message, 0)

    async def expect(self, kind: type[Message]) -> None:
        """Waits for a message of the driver."""
        async with asyncio.timeout(WAIT):
            while not isinstance((await anext(self._received))[0], kind):
                pass

    async def start(self) -> None:
        """Does what a rank does until it trains."""
        await self.expect(messages.Assign)
        if self.task == 0:
            self.send(Reached("bound", {"port": 1}))
        self.send(Reached("ready"))
        await self.expect(messages.Go)
        self.send(Reached("entered", {"time": time.time()}))

    def finish(self) -> None:
        """Reports the end of the training and, of rank 0, the value 7."""
        result = None
        if self.task == 0:
            path = str(self._folder / "value.json")
            size, digest = formats.write(7, "json", path)
            result = {"format": "json", "size": size, "digest": digest, "path": path, "summary": {}, "value": 7}
        self.send(Reached("returned", {"time": time.time()}), Finished(time.time(), result))

    async def leave(self) -> None:
        """Closes the connection as agreed."""
        self.connection.send(Bye())
        self.connection.close()


Script = Callable[[Agent], Awaitable[None]]


@dataclass(frozen=True)
class Scripted(LocalEngine):
    """This machine, where a script plays the agent of each rank."""

    scripts: tuple[Script, ...] = ()
    folder: Path = Path()
    error: BaseException | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def open(self, job: Job, env: Mapping[str, str]) -> "Session":
        """Returns a session with such agents."""
        return Session(job, self)


class Session(LocalSession):
    """Starts the agents in a thread of this process."""

    def __init__(self, job: Job, engine: Scripted) -> None:
        super().__init__(job)
        self._engine = engine

    def num_agents(self, num_tasks: int) -> int:
        """Returns one for each rank."""
        return num_tasks

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts them."""
        return Group(config, self._engine, on_end)


class Group(AgentGroup):
    """The scripts, until each has ended or the driver cancels them."""

    def __init__(self, config: AgentConfig, engine: Scripted, on_end: OnEnd) -> None:
        super().__init__()
        self._engine = engine
        self._hold(lambda: asyncio.run(self._play(config)), on_end)

    async def _play(self, config: AgentConfig) -> None:
        plays = asyncio.gather(*(self._play_one(config, task) for task in range(len(self._engine.scripts))))
        while not (plays.done() or self._engine.cancelled.is_set()):
            await asyncio.sleep(0.01)
        plays.cancel()
        if self._engine.error:
            raise self._engine.error

    async def _play_one(self, config: AgentConfig, task: int) -> None:
        hosts, port = config["driver"]
        driver = Driver(hosts, port, config["secret"])
        connection = await driver.find(task, WAIT)
        keeping = asyncio.create_task(connection.keep("the driver"))
        version = platform.python_version()
        connection.send(Join("127.0.0.1", "127.0.0.1", f"host-{task}", python=version, gpus=[], workers=1))
        try:
            await self._engine.scripts[task](Agent(connection, self._engine.folder, task))
        finally:
            keeping.cancel()

    def cancel(self) -> None:
        """Ends the scripts."""
        self._engine.cancelled.set()

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the error that a script gave to the engine."""
        return EngineError(f"the engine: {error}")


async def succeed(agent: Agent) -> None:
    await agent.start()
    agent.finish()
    await agent.expect(End)
    await agent.leave()


async def wait_for_stop(agent: Agent) -> None:
    await agent.start()
    await agent.expect(Stop)
    await agent.leave()


@dataclass
class Played:
    """How the run of some scripts has ended."""

    value: Any = None
    error: Any = None
    directory: Path = Path()
    was_cancelled: bool = False


@pytest.fixture
def play(launcher: Launcher, tmp_path: Path) -> Callable[..., Played]:
    def run(*scripts: Script, error: BaseException | None = None, **options: Any) -> Played:
        engine = Scripted(scripts=scripts, folder=tmp_path, error=error)
        played = Played(directory=Path(str(launcher.store)) / "run")
        options = {"num_processes": len(scripts), "run_id": "run", "stop_grace": 1.0, "engine": engine, **options}
        try:
            played.value = launcher.options(**options).run(int)
        except RankZeroError as failed:
            played.error = failed
        played.was_cancelled = engine.cancelled.is_set()
        return played

    return run


def test_an_agent_that_dies_after_the_success_does_not_end_the_others(play: Callable[..., Played]) -> None:
    async def die(agent: Agent) -> None:
        await agent.start()
        agent.finish()
        await agent.expect(End)
        agent.connection.abort("")

    async def print_late(agent: Agent) -> None:
        await agent.start()
        agent.finish()
        await agent.expect(End)
        await asyncio.sleep(3.0)
        agent.send(messages.Log(["the last line"]))
        await agent.leave()

    played = play(print_late, die, error=RuntimeError("an executor was lost"))
    assert (played.value, played.was_cancelled) == (7, False)
    assert list(RunHandle.attach(played.directory).logs(rank=0))[-1] == "the last line"


def test_ranks_that_never_begin_behind_the_rendezvous_end_the_start(play: Callable[..., Played]) -> None:
    async def fetch(agent: Agent) -> None:
        await agent.expect(messages.Assign)
        agent.send(Reached("bound", {"port": 1}), Reached("ready"))
        await agent.expect(Stop)
        await agent.leave()

    assert "no rank has begun" in str(play(fetch, start_timeout=2.0, hang_timeout=1.0).error)


def test_samples_of_a_host_do_not_delay_the_end_of_a_run_whose_rank_cannot_be_reaped(
    play: Callable[..., Played],
) -> None:
    async def sample(agent: Agent) -> None:
        await agent.start()
        agent.finish()
        while True:
            await asyncio.sleep(1.0)
            agent.connection.send(messages.Usage({"time": time.time(), "cores": 1}))

    played = play(sample, exit_timeout=0.1)
    assert (played.value, played.was_cancelled) == (7, True)


def test_a_report_while_ranks_are_stopped_is_the_cause_of_the_consequences(play: Callable[..., Played]) -> None:
    async def consequence(agent: Agent) -> None:
        await agent.start()
        agent.send(Failed(1.0, "ConnectionError", "closed by peer", collateral=True))
        await agent.expect(Stop)
        await agent.leave()

    async def late(agent: Agent) -> None:
        await agent.start()
        await agent.expect(messages.Dump)
        agent.send(messages.Stack("here"))
        await agent.expect(Stop)
        agent.send(Failed(1.0, "ValueError", "the cause"))
        await agent.leave()

    played = play(consequence, late)
    assert isinstance(played.error, WorkerFailedError)
    assert (played.error.rank, played.error.exception_type) == (1, "ValueError")


@pytest.mark.parametrize("is_consequence", [False, True])
def test_a_cancel_is_noted_at_once_behind_a_failure(
    play: Callable[..., Played], launcher: Launcher, monkeypatch: pytest.MonkeyPatch, is_consequence: bool
) -> None:
    # The driver would wait for the cause of a consequence longer than this test.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "100")

    async def fail(agent: Agent) -> None:
        await agent.start()
        agent.send(Failed(1.0, "ValueError", "the cause", collateral=is_consequence))
        if not is_consequence:
            await agent.expect(Stop)
        run = RunHandle.attach(Path(str(launcher.store)) / "run")
        run.cancel()
        async with asyncio.timeout(WAIT):
            while not run.status().cancelling:
                await asyncio.sleep(0.01)
        noted.append(True)
        await agent.leave()

    noted: list[bool] = []
    played = play(fail, wait_for_stop, stop_grace=WAIT)
    assert (played.error.exception_type, played.was_cancelled, noted) == ("ValueError", False, [True])


def test_what_an_agent_sent_before_its_end_counts_before_the_engines_error(play: Callable[..., Played]) -> None:
    async def fail_and_exit(agent: Agent) -> None:
        await agent.start()
        agent.send(*[messages.Log(["x" * 1000])] * 1000, Failed(1.0, "ValueError", "the cause"))
        while agent.connection.unsent:
            await asyncio.sleep(0.01)
        agent.connection.close()

    played = play(fail_and_exit, error=RuntimeError("an executor was lost"))
    assert isinstance(played.error, WorkerFailedError)
    assert played.error.exception_type == "ValueError"


def test_a_cancel_stops_ranks_and_ends_agents_without_a_reply(play: Callable[..., Played], launcher: Launcher) -> None:
    async def ignore(agent: Agent) -> None:
        await agent.start()
        RunHandle.attach(Path(str(launcher.store)) / "run").cancel()
        await asyncio.sleep(WAIT)

    played = play(wait_for_stop, ignore)
    assert isinstance(played.error, RunCancelledError)
    assert played.was_cancelled
