"""The matrix of faults: who is hurt, when, how, and what comes of it.

Each line of `CELLS` is one test. Whatever the cell: the newest checkpoint loads, at most one checkpoint's work is lost,
and no process is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ORPHAN_TIMEOUT, ROOT, is_alive, processes_with, until
from tests.faults import kit
from tests.faults.kit import Arrival, Proxy, ProxyEngine
from tests.faults.trainings import HOLD_AT, STEPS, arrive, expected, train

from rankzero import (
    EngineError,
    HangError,
    InvalidJobError,
    Launcher,
    RankZeroError,
    ResultError,
    RunHandle,
    SparkConnectEngine,
    SparkEngine,
    WorkerFailedError,
    bounds,
)
from rankzero.engines.base import Engine
from rankzero.run.status import RunStatus
from rankzero.task.hold import SHARED

WAIT = 120.0  # For what is not measured: a start, a JVM, an end without a fault

NAMED = 12.0
"""From a death that the kernel tells of to the caller's error or to the decision to restart, on a busy machine; a
silence is noticed after 15 s."""

SPARK_NAMED = 20.0  # The same through Spark, which takes its time to give up a barrier stage

HANG_TIMEOUT = 3.0
HUNG = HANG_TIMEOUT + bounds.STACKS_WINDOW() + NAMED
"""From a stop to the `HangError`: the timeout, the wait for stacks."""

LOST = bounds.CONNECTION_LOST_AFTER() + 2.0 + 4.0 + NAMED
"""From a silence to the verdict: silence, the engine's chance to explain, the end of what does not answer."""

HEALED = 20.0  # From a cut that heals to the end of the training

ENDED = 35.0  # From a stop after the last commit to the end of the run, which waits for the final messages

GONE = ORPHAN_TIMEOUT  # From the end of a driver to the end of every process of its run

RESTARTED = 40.0  # From the fault to the right value of the next attempt: it imports torch once more

SPARK_RESTARTED = 90.0  # The same with an executor to be replaced


@dataclass(frozen=True)
class Cell:
    """One line of the matrix.

    Attributes:
        target: Who is hurt.
        moment: When; see `MOMENTS`.
        fault: How.
        outcome: What comes of it; see `OUTCOMES`.
        cause: What the restart or the error gives as its cause; or the state that attachers see.
        bound: Seconds from the fault to what it leads to.
        who: The rank that stands at the moment.
        ranks: World size; one where a second adds nothing.
        engine: Where.
        by_hand: Takes long or adds little: run by hand.
    """

    target: str
    moment: str
    fault: str
    outcome: str
    cause: str | None = None
    bound: float = NAMED
    who: int = 0
    ranks: int = 1
    engine: str = "local"
    by_hand: bool = False

    @property
    def name(self) -> str:
        where = {"local": "", "spark": f" of {self.ranks}", "connect": " on Spark Connect"}[self.engine]
        return f"{self.target}{where}, {self.moment}, {self.fault}: {self.outcome}"


DRIVEN_HERE = ("worker", "agent", "channel")
"""By a driver in this process: the proxy is here, and its zygote serves many cells."""

MOMENTS = {
    "rendezvous": "a rank has started and not yet joined its process group",
    "training": "in a step; the other rank waits in the collective",
    "checkpoint": "rank 0 writes a checkpoint; for the driver: it commits one",
    "returned": "rank 0 has returned, and its value is being written",
    "half": "rank 0 has committed, and rank 1 is not there yet",
    "committed": "every rank has committed, rank 0 runs exit handlers; for the submitter: it loads the value",
}

LAST_REPORTED = {"rendezvous": -1, "training": HOLD_AT - 1, "checkpoint": HOLD_AT - 1} | dict.fromkeys(
    ("returned", "half", "committed"), STEPS - 1
)
"""The step of the last checkpoint at each moment."""

SPARK: dict[str, Any] = {"engine": "spark", "bound": SPARK_NAMED}
CONNECT: dict[str, Any] = {"engine": "connect", "ranks": 2, "by_hand": True}
"""Driven in its own stage."""

CELLS = [
    # A rank. Killed from outside it is worth another attempt; once it has committed nobody needs it. With what it has
    # returned in its hands it does not end when it is asked to.
    Cell("worker", "rendezvous", "SIGKILL", "restart", "killed", ranks=2, who=1, by_hand=True),
    Cell("worker", "training", "SIGKILL", "restart", "killed", ranks=2, who=1),
    Cell("worker", "training", "SIGKILL", "error", "killed", ranks=2, who=0, by_hand=True),
    Cell("worker", "checkpoint", "SIGKILL", "restart", "killed", ranks=2, by_hand=True),
    Cell("worker", "returned", "SIGKILL", "restart", "killed", ranks=2, by_hand=True),
    Cell("worker", "half", "SIGKILL", "restart", "killed", ranks=2, who=1, by_hand=True),
    Cell("worker", "committed", "SIGKILL", "unharmed", by_hand=True),
    Cell("worker", "rendezvous", "SIGTERM", "restart", "preempted", by_hand=True),
    Cell("worker", "training", "SIGTERM", "restart", "preempted", ranks=2, who=0, by_hand=True),
    Cell("worker", "training", "SIGTERM", "error", "preempted", ranks=2, who=1, by_hand=True),
    Cell("worker", "checkpoint", "SIGTERM", "restart", "preempted", by_hand=True),
    Cell("worker", "returned", "SIGTERM", "unharmed", bound=ENDED, by_hand=True),
    Cell("worker", "committed", "SIGTERM", "unharmed", by_hand=True),
    Cell("worker", "rendezvous", "SIGSTOP", "restart", "hang", bound=HUNG, by_hand=True),
    Cell("worker", "training", "SIGSTOP", "restart", "hang", bound=HUNG, ranks=2, who=1, by_hand=True),
    Cell("worker", "training", "SIGSTOP", "error", "hang", bound=HUNG, ranks=2, who=1, by_hand=True),
    Cell("worker", "checkpoint", "SIGSTOP", "restart", "hang", bound=HUNG, by_hand=True),
    Cell("worker", "returned", "SIGSTOP", "restart", "hang", bound=HUNG, by_hand=True),
    Cell("worker", "committed", "SIGSTOP", "unharmed", bound=ENDED, by_hand=True),
    # The agent takes its ranks along; until every rank has committed that is a lost host.
    Cell("agent", "rendezvous", "SIGKILL", "restart", "lost", by_hand=True),
    Cell("agent", "training", "SIGKILL", "restart", "lost", ranks=2),
    Cell("agent", "training", "SIGKILL", "error", "lost", by_hand=True),
    Cell("agent", "checkpoint", "SIGKILL", "restart", "lost", by_hand=True),
    Cell("agent", "returned", "SIGKILL", "restart", "lost", by_hand=True),
    Cell("agent", "half", "SIGKILL", "restart", "lost", ranks=2, who=1, by_hand=True),
    Cell("agent", "committed", "SIGKILL", "unharmed"),
    Cell("agent", "rendezvous", "SIGTERM", "restart", "preempted", by_hand=True),
    Cell("agent", "training", "SIGTERM", "restart", "preempted", ranks=2, by_hand=True),
    Cell("agent", "training", "SIGTERM", "error", "preempted", by_hand=True),
    Cell("agent", "checkpoint", "SIGTERM", "restart", "preempted", by_hand=True),
    Cell("agent", "returned", "SIGTERM", "restart", "preempted", by_hand=True),
    Cell("agent", "committed", "SIGTERM", "unharmed", by_hand=True),
    Cell("agent", "training", "SIGSTOP", "restart", "lost", bound=LOST, by_hand=True),
    Cell("agent", "committed", "SIGSTOP", "unharmed", bound=ENDED, by_hand=True),
    # The executor's JVM holds the agent's standard input. Stopped, it holds nobody up but Spark.
    Cell("executor", "training", "SIGKILL", "restart", "lost", **SPARK),
    Cell("executor", "training", "SIGKILL", "restart", "lost", ranks=2, **SPARK, by_hand=True),
    Cell("executor", "committed", "SIGKILL", "unharmed", **SPARK, by_hand=True),
    Cell("executor", "training", "SIGTERM", "restart", "lost|preempted", **SPARK, by_hand=True),
    Cell("executor", "training", "SIGSTOP", "unharmed", ranks=2, engine="spark", bound=60.0, by_hand=True),
    # What is the same in a stage that has the driver within, and what Spark tells of its death.
    Cell("worker", "training", "SIGKILL", "restart", "killed", who=1, **CONNECT),
    Cell("worker", "training", "SIGSTOP", "restart", "hang", bound=HUNG, who=1, **CONNECT),
    Cell("worker", "committed", "SIGKILL", "unharmed", **CONNECT),
    Cell("agent", "training", "SIGKILL", "restart", "lost", **CONNECT),
    Cell("agent", "training", "SIGTERM", "restart", "preempted", **CONNECT),
    Cell("driver", "training", "SIGKILL", "resubmit", "failed", bound=SPARK_NAMED, **CONNECT),
    Cell("driver", "committed", "SIGKILL", "kept", "succeeded", bound=SPARK_NAMED, **CONNECT),
    # The driver: whoever is attached is told; the run id goes on where the last checkpoint was.
    Cell("driver", "rendezvous", "SIGKILL", "resubmit", "failed", by_hand=True),
    Cell("driver", "training", "SIGKILL", "resubmit", "failed", ranks=2),
    Cell("driver", "checkpoint", "SIGKILL", "resubmit", "failed", by_hand=True),
    Cell("driver", "returned", "SIGKILL", "resubmit", "failed", by_hand=True),
    Cell("driver", "committed", "SIGKILL", "kept", "succeeded", by_hand=True),
    Cell("driver", "rendezvous", "SIGTERM", "resubmit", "cancelled", by_hand=True),
    Cell("driver", "training", "SIGTERM", "resubmit", "cancelled", ranks=2, by_hand=True),
    Cell("driver", "checkpoint", "SIGTERM", "resubmit", "cancelled", by_hand=True),
    Cell("driver", "returned", "SIGTERM", "resubmit", "cancelled", by_hand=True),
    Cell("driver", "committed", "SIGTERM", "unharmed", by_hand=True),
    # The process that called `submit` owns nothing; the one that called `run` owns its run until it has the value.
    Cell("submitter", "rendezvous", "SIGKILL", "durable", by_hand=True),
    Cell("submitter", "training", "SIGKILL", "owned", "failed"),
    Cell("submitter", "committed", "SIGKILL", "delivered", by_hand=True),
    Cell("submitter", "training", "SIGTERM", "owned", "failed", by_hand=True),
    Cell("submitter", "training", "SIGSTOP", "durable", by_hand=True),
    Cell("submitter", "training", "SIGSTOP", "paused", bound=LOST + HEALED, by_hand=True),
    # The connection of an agent: a silence that heals loses nothing, wherever it falls; a reset ends the attempt.
    Cell("channel", "rendezvous", "deaf", "unharmed", bound=HEALED, by_hand=True),
    Cell("channel", "training", "deaf", "unharmed", bound=HEALED, ranks=2),
    Cell("channel", "checkpoint", "deaf", "unharmed", bound=HEALED, by_hand=True),
    Cell("channel", "returned", "deaf", "unharmed", bound=HEALED, by_hand=True),
    Cell("channel", "committed", "deaf", "unharmed", bound=HEALED),
    Cell("channel", "training", "deaf", "restart", "lost", bound=LOST, by_hand=True),
    Cell("channel", "training", "cut", "restart", "lost"),
    Cell("channel", "training", "cut", "error", "lost", by_hand=True),
    Cell("channel", "committed", "cut", "unharmed", bound=HEALED),
    # The disk of the run directory. A rank that cannot write says so; everything else waits for room.
    Cell("store", "rendezvous", "full", "refused", by_hand=True),
    Cell("store", "training", "full", "unharmed", by_hand=True),
    Cell("store", "checkpoint", "full", "no room", "ResultError"),
    Cell("store", "returned", "full", "no room", "ResultError", by_hand=True),
    Cell("store", "committed", "full", "unharmed", by_hand=True),
]


class Stage:
    """One cell's run, and what is needed to hurt it."""

    def __init__(
        self, cell: Cell, launcher: Launcher, folder: Path, store: Path, stack: ExitStack, engine: Engine | None
    ) -> None:
        self.cell = cell
        self.folder = folder
        self.store = store
        self.directory = store / "run"
        self.launcher = launcher.options(num_processes=cell.ranks, store=store, run_id="run", engine=engine)
        if (cell.moment, cell.outcome) == ("committed", "unharmed") and cell.fault != "SIGSTOP":
            # The rank stands in its exit handler until it may go.
            self.launcher = self.launcher.options(exit_timeout=WAIT)
        self.stack = stack
        self.proxy: Proxy | None = None
        self.value: Future[Any] | None = None
        # The address of the suite's zygotes, where the cell has zygotes of its own.
        self.shared = ""
        self.struck_at = 0.0
        self._wall_at = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        # A driver in its commit is hurt before there is another checkpoint.
        stays = (self.cell.target, self.cell.moment) == ("driver", "checkpoint")
        return {"folder": str(self.folder), "moment": self.cell.moment, "who": self.cell.who, "stays": stays}

    def start(self, **options: Any) -> RunHandle[Any]:
        """Submits the training, or runs it in a thread of this process."""
        self.launcher = self.launcher.options(**options)
        if self.cell.target not in DRIVEN_HERE or self.cell.engine == "connect":
            return self.launcher.submit(train, **self.arguments)
        if self.cell.target == "channel":
            self.proxy = Proxy(self.folder / "driver-port")
            self.stack.callback(self.proxy.close)
            self.launcher = self.launcher.options(engine=ProxyEngine(self.proxy.port, str(self.proxy.file)))
        executor = ThreadPoolExecutor(1)
        self.stack.callback(executor.shutdown)
        self.value = executor.submit(lambda: self.launcher.run(train, **self.arguments))
        done = self.value.done
        until(lambda: self.directory.joinpath("submissions", "0.json").exists() or done(), WAIT, "a run directory")
        return RunHandle.attach(self.directory)

    def arrival(self, handle: RunHandle[Any] | None = None) -> Arrival:
        """The rank that stands at the cell's moment."""

        def look() -> Arrival | None:
            if handle and handle.status().final:
                handle.result(0)
            return kit.arrival(self.folder, self.cell.moment)

        return until(look, WAIT, f"a rank at {self.cell.moment!r}")

    def processes(self) -> list[int]:
        """Everything that belongs to the run."""
        return processes_with(str((self.launcher.env or {})["MARK"]))

    def go(self) -> None:
        """Lets the rank go."""
        (self.folder / "go").touch()

    def strike(self, pid: int) -> None:
        """Sends the cell's signal."""
        self.note_strike()
        os.kill(pid, getattr(signal, self.cell.fault))
        if self.shared:
            # The next submission uses them; in the nightly cells it starts zygotes of its own, as it does for users.
            os.environ[SHARED] = self.shared
        if self.cell.fault == "SIGSTOP":
            self.stack.callback(wake, pid)

    def note_strike(self) -> None:
        """The clock of the cell starts."""
        self.reported = self.due()
        self.struck_at, self._wall_at = time.monotonic(), time.time()

    def due(self) -> int:
        """The last step whose checkpoint was reported.

        Rank 0 may be a moment behind the rank that arrived; and these steps take less time than a commit does, so
        the one before has to be waited for.
        """
        least = LAST_REPORTED[self.cell.moment]
        until(lambda: kit.reported(self.folder) >= least, WAIT, f"the report of step {least}")
        if least > 0:
            handle = RunHandle.attach(self.directory)
            until(lambda: kit.newest_step(handle) >= least - 1, WAIT, f"the commit of step {least - 1}")
        return kit.reported(self.folder)

    def await_second(self, second: float) -> None:
        """Until the fault has lasted so long."""
        until(lambda: time.monotonic() - self.struck_at > second, WAIT, f"second {second} of the fault")

    def assert_in_time(self, bound: float | None = None) -> None:
        """The outcome is there, and in time."""
        self._assert_within(time.monotonic() - self.struck_at, bound or self.cell.bound)

    def assert_ended_in_time(self, status: RunStatus) -> None:
        """The run has ended, and in time; `run` returns later, once the report of the run is written."""
        assert status.ended is not None
        self._assert_within(status.ended - self._wall_at, self.cell.bound)

    def _assert_within(self, took: float, bound: float) -> None:
        assert took < bound, f"{took:.1f} s"

    def restart_event(self, handle: RunHandle[Any]) -> dict[str, Any]:
        """The one restart, which was decided in time."""
        (event,) = [event for event in handle.events() if event["type"] == "restart"]
        self._assert_within(event["time"] - self._wall_at, self.cell.bound)
        return event

    def assert_continued(self, value: dict[str, Any], attempt: int = 1) -> None:
        """The value is right, and ``attempt`` went on from the last checkpoint or the one before it."""
        assert value["value"] == expected(STEPS, self.cell.ranks)
        *before, (last, first) = value["history"]
        assert last == attempt
        assert self.reported <= first <= self.reported + 1
        assert before == ([[0, 0]] if first else [])

    def assert_whole(self, value: dict[str, Any]) -> None:
        """The value is right, and one attempt was enough."""
        assert value["value"] == expected(STEPS, self.cell.ranks)
        assert value["history"] == [[0, 0]]

    def assert_saved(self, handle: RunHandle[Any], least: int) -> None:
        """The newest checkpoint loads and is of this step or a later one."""
        assert kit.newest_step(handle) >= least


def strike(stage: Stage, handle: RunHandle[Any], at: Arrival) -> None:
    """Does to the cell's target what the cell says."""
    target, fault = stage.cell.target, stage.cell.fault
    if target == "worker":
        stage.strike(at.pid)
    elif target == "agent":
        stage.strike(at.agent)
    elif target == "executor":
        stage.strike(kit.executor_of(at.agent))
    elif target == "driver":
        stage.strike(driver_of(handle))
    elif target == "store":
        stage.note_strike()
        fill(stage.store)
    elif fault == "cut" and stage.proxy:
        stage.note_strike()
        assert stage.proxy.cut() > 0
    elif stage.proxy:
        stage.note_strike()
        stage.proxy.deafen()


def wake(pid: int) -> None:
    """Lets a stopped process go on, if it is there: one that stands still cannot end."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def driver_of(handle: RunHandle[Any]) -> int:
    pid = until(lambda: handle.status().driver_pid, WAIT, "a driver")
    assert pid != os.getpid()
    return pid


def fill(disk: Path) -> None:
    """Leaves no room, down to the last byte; takes what a file gives back that was just being replaced, too."""
    until(lambda: not take_room(disk / "filler"), WAIT, "a full disk", pause=0.2)


def take_room(filler: Path) -> int:
    """The bytes that there were."""
    with open(filler, "ab", buffering=0) as file:
        before = file.tell()
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass
        return file.tell() - before


# -- what comes of it --------------------------------------------------------------------------


def restart(stage: Stage) -> None:
    """The next attempt returns the right value."""
    hang = HANG_TIMEOUT if stage.cell.cause == "hang" else None
    preempted = "preempted" in str(stage.cell.cause)
    restarts = 0 if stage.cell.cause == "preempted" else 1
    handle = stage.start(max_restarts=restarts, max_preemptions=int(preempted), hang_timeout=hang)
    strike_and_heal_later(stage, handle)
    value = result(stage, handle, WAIT)
    stage.assert_in_time(stage.cell.bound + (SPARK_RESTARTED if stage.cell.engine == "spark" else RESTARTED))
    stage.assert_continued(value)
    assert stage.restart_event(handle)["cause"] in str(stage.cell.cause).split("|")
    assert handle.status().attempt == 1
    stage.assert_saved(handle, STEPS - 1)


def strike_and_heal_later(stage: Stage, handle: RunHandle[Any]) -> None:
    """Hurts for good; what the fault leaves in the way of another attempt is removed when it is about to begin."""
    at = stage.arrival(handle)
    if stage.cell.target == "channel" and stage.proxy:
        stage.note_strike()
        stage.proxy.shut() if stage.cell.fault == "cut" else stage.proxy.deafen()
        until(lambda: handle.status().attempt or handle.status().final, LOST, "the end of the attempt")
        stage.proxy.heal()
    else:
        strike(stage, handle, at)


def result(stage: Stage, handle: RunHandle[Any], timeout: float) -> Any:
    """The run's value, from whoever has it."""
    return stage.value.result(timeout) if stage.value else handle.result(timeout)


def error(stage: Stage) -> None:
    """The first cause, typed."""
    cell = stage.cell
    handle = stage.start(max_restarts=0, hang_timeout=HANG_TIMEOUT if cell.cause == "hang" else None)
    strike_and_heal_later(stage, handle)
    with pytest.raises(RankZeroError) as caught:
        result(stage, handle, WAIT)
    stage.assert_in_time()
    failure = caught.value
    if cell.cause == "hang":
        assert type(failure) is HangError
        assert failure.missing == [cell.who]
        assert "SIGSTOP" in (failure.stacks or {})[str(cell.who)]
    elif cell.target == "worker":
        assert type(failure) is WorkerFailedError
        assert (failure.rank, failure.signal, failure.cause) == (cell.who, cell.fault, cell.cause)
    else:
        assert type(failure) is EngineError
        assert failure.cause == cell.cause
    assert handle.status().state == "failed"
    stage.assert_saved(handle, stage.reported - 1)


def unharmed(stage: Stage) -> None:
    """One attempt is enough: nobody notices."""
    handle = stage.start(max_restarts=0)
    at = stage.arrival(handle)
    strike(stage, handle, at)
    if stage.cell.fault == "deaf" and stage.proxy:
        # Longer than a connection may be silent, shorter than an agent may be.
        stage.await_second(7)
        stage.proxy.heal()
    if stage.cell.fault == "full":
        if stage.cell.moment == "committed":
            stage.go()
        beat = handle.status().heartbeat
        stage.await_second(5)
        assert handle.status().heartbeat == beat
        assert not handle.status().final
        (stage.store / "filler").unlink()
    stage.go()
    value = result(stage, handle, WAIT)
    if stage.value:
        stage.assert_ended_in_time(handle.status())
    else:
        stage.assert_in_time(RESTARTED if stage.cell.target == "store" else None)
    stage.assert_whole(value)
    assert handle.status().attempt == 0
    stage.assert_saved(handle, STEPS - 1)


def await_end(stage: Stage) -> RunHandle[Any]:
    """Waits for what attachers see, and for the end of every process."""
    attached = RunHandle[Any].attach(stage.directory)
    assert attached.wait(WAIT)
    stage.assert_in_time()
    assert attached.status().state == stage.cell.cause
    until(lambda: stage.processes() == [], GONE, "the end of its processes")
    return attached


def resubmit(stage: Stage) -> None:
    """Attachers see the end, every process goes, and the run id goes on."""
    handle = stage.start()
    if stage.cell.moment == "checkpoint":
        hurt_driver_in_commit(stage, handle)
    else:
        at = stage.arrival(handle)
        strike(stage, handle, at)
    attached = await_end(stage)
    stage.assert_saved(attached, stage.reported - 1)
    again = stage.launcher.submit(train, **stage.arguments)
    stage.assert_continued(again.result(WAIT))
    stage.assert_saved(again, STEPS - 1)


def kept(stage: Stage) -> None:
    """Success was certain: attachers see it, every process goes, and the run id gives the value to who comes next."""
    handle = stage.start()
    strike(stage, handle, stage.arrival(handle))
    attached = await_end(stage)
    stage.assert_whole(attached.result(0))
    again = stage.launcher.submit(train, **stage.arguments)
    stage.assert_whole(again.result(0))
    assert again.job.submission == 0


def hurt_driver_in_commit(stage: Stage, handle: RunHandle[Any]) -> None:
    """The part is there, the manifest is not: the driver stands still in between, and gets the signal there."""
    stage.arrival(handle)
    until(lambda: kit.newest_step(handle) == HOLD_AT - 1, WAIT, "the checkpoint before")
    pid = driver_of(handle)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: kit.is_stopped(pid), WAIT, "a stopped driver")
    stage.go()
    until(lambda: kit.reported(stage.folder) == HOLD_AT, WAIT, "the checkpoint's part")
    stage.strike(pid)
    os.kill(pid, signal.SIGCONT)


def start_submitter(stage: Stage, how: str, **arguments: Any) -> subprocess.Popen[str]:
    asked = {
        "how": how,
        "launcher": {
            "num_processes": stage.cell.ranks,
            "store": str(stage.store),
            "run_id": "run",
            "env": stage.launcher.env,
        },
        "train": {**stage.arguments, **arguments},
    }
    command = [sys.executable, "-m", "tests.faults.submitter", json.dumps(asked)]
    submitter = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stage.stack.callback(submitter.communicate)
    stage.stack.callback(submitter.kill)
    return submitter


def durable(stage: Stage) -> None:
    """The run of `submit` does not notice."""
    submitter = start_submitter(stage, "submit")
    until((stage.folder / "submitted").exists, WAIT, "a submission")
    stage.arrival()
    stage.strike(submitter.pid)
    if stage.cell.fault == "SIGSTOP":
        until(lambda: kit.is_stopped(submitter.pid), WAIT, "a stopped submitter")
    else:
        submitter.wait(WAIT)
    stage.go()
    handle = RunHandle.attach(stage.directory)
    stage.assert_whole(handle.result(WAIT))
    stage.assert_in_time(RESTARTED)
    stage.assert_saved(handle, STEPS - 1)


def owned(stage: Stage) -> None:
    """The run of `run` ends with its caller; called again it goes on."""
    submitter = start_submitter(stage, "run")
    stage.arrival()
    stage.strike(submitter.pid)
    submitter.wait(WAIT)
    handle = await_end(stage)
    stage.assert_saved(handle, stage.reported - 1)
    stage.assert_continued(stage.launcher.run(train, **stage.arguments))


def paused(stage: Stage) -> None:
    """The run of `run` pauses with its caller, as with Ctrl-Z and ``fg``: a gap in its time is no silence of agents."""
    submitter = start_submitter(stage, "run")
    stage.arrival()
    stage.strike(submitter.pid)
    stage.await_second(bounds.CONNECTION_LOST_AFTER() + 2.0)
    wake(submitter.pid)
    stage.go()
    submitter.wait(WAIT)
    stage.assert_in_time()
    stage.assert_whole(json.loads((stage.folder / "value").read_text()))


def delivered(stage: Stage) -> None:
    """The value was there, and nobody had it: the next call gets it and trains nothing."""
    submitter = start_submitter(stage, "run", hold_value=True)
    until(lambda: kit.arrival(stage.folder, "committed"), WAIT, "a committed value")
    stage.go()
    until(lambda: kit.arrival(stage.folder, "delivery"), WAIT, "a submitter that loads the value")
    stage.strike(submitter.pid)
    submitter.wait(WAIT)
    (stage.folder / "loaded").touch()
    value = stage.launcher.run(train, **stage.arguments, hold_value=True)
    stage.assert_in_time()
    stage.assert_whole(value)
    assert RunHandle.attach(stage.directory).status().attempt == 0


def refused(stage: Stage) -> None:
    """Without room nothing starts; with room it does."""
    stage.note_strike()
    fill(stage.store)
    with pytest.raises(InvalidJobError) as refusal:
        stage.start()
    assert refusal.value.code == "RZ-1008"
    stage.assert_in_time()
    (stage.store / "filler").unlink()
    stage.go()
    stage.note_strike()
    stage.assert_whole(stage.start().result(WAIT))
    # Nobody waits for the submission that failed.
    stage.assert_in_time()


def no_room(stage: Stage) -> None:
    """The rank says what it could not write; with room again the run id goes on."""
    handle = stage.start(max_restarts=1)
    at = stage.arrival(handle)
    stage.note_strike()
    fill(stage.store)
    stage.go()
    until(lambda: not is_alive(at.pid), WAIT, "the end of the rank that cannot write")
    (stage.store / "filler").unlink()
    with pytest.raises(ResultError, match="No space left"):
        handle.result(WAIT)
    stage.assert_in_time(RESTARTED)
    stage.assert_saved(handle, stage.reported - 1)
    stage.assert_continued(stage.launcher.submit(train, **stage.arguments).result(WAIT))


OUTCOMES: dict[str, Callable[[Stage], None]] = {
    "restart": restart,
    "error": error,
    "unharmed": unharmed,
    "resubmit": resubmit,
    "kept": kept,
    "durable": durable,
    "owned": owned,
    "paused": paused,
    "delivered": delivered,
    "refused": refused,
    "no room": no_room,
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield disk
    # The last process of the run may have the log open for a moment longer.
    until(lambda: subprocess.run(["umount", str(disk)], capture_output=True).returncode == 0, GONE, "a quiet disk")


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=cell.name, marks=[pytest.mark.soak] * cell.by_hand) for cell in CELLS]
)
def test_cell(
    cell: Cell, launcher: Launcher, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine | None = None
    if cell.engine == "spark":
        engine = SparkEngine(master=f"local-cluster[{cell.ranks},1,1024]")
    elif cell.engine == "connect":
        # Before the marker: a server is no process of the run.
        engine = SparkConnectEngine(request.getfixturevalue("server").url)
    # Drivers, agents and JVMs carry the marker too, so that the fixture sees every process of the run.
    assert launcher.env
    monkeypatch.setenv("MARK", launcher.env["MARK"])
    # In every run of the suite for one cell of each target: with the others, what forked their zygote stays.
    shared = ""
    is_own = cell.by_hand or cell.moment == "training"
    if is_own and cell.target in ("executor", "driver", "submitter") and cell.engine != "connect":
        shared = os.environ[SHARED]
        request.getfixturevalue("own_zygotes")
    folder = tmp_path / "folder"
    folder.mkdir()
    store = request.getfixturevalue("small_disk") if cell.target == "store" else tmp_path / "store"
    with ExitStack() as stack:
        stage = Stage(cell, launcher, folder, store, stack, engine)
        stage.shared = "" if cell.by_hand else shared
        OUTCOMES[cell.outcome](stage)


assert HOLD_AT < STEPS - 1


@pytest.mark.parametrize(
    ("max_preemptions", "how"),
    [*(pytest.param(*case, marks=pytest.mark.soak) for case in ((0, "exit"), (1, "return"))), (1, "exit")],
)
def test_a_preempted_place_counts_as_that_also_when_its_ranks_end_politely(
    launcher: Launcher, tmp_path: Path, max_preemptions: int, how: str
) -> None:
    class Asked(Exception):
        pass

    def leave(*_: object) -> None:
        raise SystemExit(0) if how == "exit" else Asked()

    def wait_for_the_end(folder: str) -> int:
        import rankzero.train as rt

        if rt.get_context().attempt == 0:
            signal.signal(signal.SIGTERM, leave)
            with suppress(Asked):
                arrive(folder, "training")
        return rt.get_context().attempt

    handle = launcher.options(num_processes=1, max_preemptions=max_preemptions).submit(wait_for_the_end, str(tmp_path))
    at = until(lambda: kit.arrival(tmp_path, "training"), WAIT, "a rank")
    os.kill(at.agent, signal.SIGTERM)
    if max_preemptions:
        assert handle.result(WAIT) == 1
    else:
        with pytest.raises(EngineError, match="SIGTERM") as caught:
            handle.result(WAIT)
        assert caught.value.cause == "preempted"
