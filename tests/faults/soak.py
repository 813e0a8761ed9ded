"""The soak: one training after the other, hurt at random, and every one must come out right.

    python -m tests.faults.soak --faults 200 --minutes 30 --seed 1

Each round is a run with a plan that follows from the seed and the round's number alone: how it is submitted, how
long it is, and one or more faults (kind, target, moment). An orchestrator's loop submits the same run id until it has
the value, as Airflow would. After each round: the value is a function of every step, so a wrong resume shows; the
error of every try that failed is one that its faults explain; no checkpoint that had time to be committed is lost;
no process and no temporary directory is left. A violation is printed with what is needed to see it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.conftest import LOOK, ORPHAN_TIMEOUT, ROOT, describe, processes_with, wait_until_gone
from tests.faults import kit
from tests.faults.kit import Proxy
from tests.faults.trainings import expected

from rankzero import RunHandle, RunNotFoundError
from rankzero.task.zygotes import SHARED

RANKS = 2
MAX_RESTARTS = 1
HANG_TIMEOUT = 4.0

ROUND_BOUND = 150.0
"""Seconds for a round, however it is hurt."""

GONE = ORPHAN_TIMEOUT
"""Seconds after a round for every process to be gone: a driver's death is heard of, and ranks get their grace."""

COMMIT_LAG = 3.0
"""A checkpoint reported so long before a fault is committed, unless something stood still."""

BRIEF, LONG = (0.3, 3.0), (17.0, 19.0)
"""Seconds of a stop or a silence that nobody may notice; and of one that everybody must."""

KINDS: dict[str, tuple[str, ...]] = {
    "SIGKILL": ("worker", "agent", "driver", "submitter"),
    "SIGTERM": ("worker", "agent", "driver", "submitter"),
    "pause": ("worker", "agent", "driver", "submitter"),
    "stop": ("worker", "agent", "driver"),
    "cut": ("channel",),
    "deaf": ("channel",),
    "silence": ("channel",),
    "cancel": ("run",),
    "submit again": ("run",),
}
WEIGHTS = {
    "SIGKILL": 32,
    "SIGTERM": 16,
    "pause": 10,
    "stop": 3,
    "cut": 16,
    "deaf": 4,
    "silence": 1,
    "cancel": 6,
    "submit again": 8,
}

NOT_FOR = {"submit": {"cut", "deaf", "silence"}, "run": {"submit again"}}
"""The proxy is for a driver in the process that calls `run`; and `run` refuses a run id that lives."""

MOMENTS = ("start", "training", "end")

EXPLAINS: dict[tuple[str, str], set[tuple[str, str | None]]] = {
    ("SIGKILL", "worker"): {("WorkerFailedError", "killed")},
    ("SIGKILL", "agent"): {("EngineError", "lost")},
    ("SIGKILL", "driver"): {("EngineError", None)},
    ("SIGTERM", "worker"): {("WorkerFailedError", "preempted")},
    ("SIGTERM", "agent"): {("EngineError", "preempted")},
    # The other: before it has set its handler.
    ("SIGTERM", "driver"): {("RunCancelledError", None), ("EngineError", None)},
    ("stop", "worker"): {("HangError", None)},
    ("stop", "agent"): {("EngineError", "lost"), ("HangError", None)},
    ("stop", "driver"): {("EngineError", None), ("EngineError", "lost"), ("HangError", None)},
    ("pause", "worker"): {("HangError", None)},
    ("pause", "agent"): {("HangError", None)},
    ("silence", "channel"): {("EngineError", "lost"), ("HangError", None)},
    ("deaf", "channel"): {("HangError", None)},
    ("cancel", "run"): {("RunCancelledError", None)},
}
"""Which errors (type and cause) a fault may lead to. Others lead to none that the orchestrator sees."""


@dataclass
class Fault:
    """One fault of a plan, and what became of it."""

    kind: str
    target: str
    moment: str
    step: int
    delay: float
    length: float
    pick: float
    at: float | None = None
    """Unix time of the injection; None while it has not happened."""
    try_number: int = 0


@dataclass
class Plan:
    """What a round does; a function of seed and number."""

    seed: int
    number: int
    how: str
    steps: int
    pace: float
    restarts: int
    faults: list[Fault] = field(default_factory=list)


def make_plan(seed: int, number: int) -> Plan:
    """The plan of a round."""
    rng = random.Random(f"{seed}/{number}")
    how = rng.choice(["submit", "submit", "run"])
    steps = rng.randint(8, 20)
    plan = Plan(seed, number, how, steps, rng.choice([0.05, 0.1, 0.15]), rng.choice([0, MAX_RESTARTS, MAX_RESTARTS]))
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in NOT_FOR[how]}
        kind = rng.choices(list(weights), list(weights.values()))[0]
        target = rng.choice(KINDS[kind])
        moment = rng.choices(MOMENTS, (1, 3, 1))[0]
        low, high = LONG if kind in ("stop", "silence") else (6.0, 8.0) if kind == "deaf" else BRIEF
        plan.faults.append(
            Fault(
                kind,
                target,
                moment,
                rng.randrange(steps),
                rng.uniform(0, 2.5) if moment == "start" else rng.uniform(0, 0.3),
                round(rng.uniform(low, high), 2),
                rng.random(),
            )
        )
    plan.faults.sort(key=lambda fault: (MOMENTS.index(fault.moment), fault.step))
    return plan


class Round:
    """One run of the soak."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.folder = directory / "f"
        self.temp = directory / "t"
        self.store = directory / "s"
        for made in (self.folder, self.temp, self.store):
            made.mkdir()
        self.run_directory = self.store / "run"
        self.marker = f"soak-{os.getpid()}-{plan.number}-{directory.name}"
        self.proxy = Proxy(self.folder / "driver-port") if plan.how == "run" else None
        self.submitters: list[subprocess.Popen[bytes]] = []
        self.stopped: list[tuple[float, int]] = []
        self.heal_at: float | None = None
        self.tries = 0
        self.waiting = list(plan.faults)
        self.armed: dict[int, float] = {}
        self.problems: list[str] = []
        self.errors: list[str] = []
        self.began = time.monotonic()

    # -- the orchestrator ----------------------------------------------------------------------

    def _env(self) -> dict[str, str]:
        # With zygotes of its own, which are looked for at its end.
        own = {name: value for name, value in os.environ.items() if name != SHARED}
        return {**own, "MARK": self.marker, "TMPDIR": str(self.temp)}

    def submit(self) -> subprocess.Popen[bytes]:
        """Starts a process that submits the run id and waits for the value."""
        options = {
            "num_processes": RANKS,
            "store": str(self.store),
            "run_id": "run",
            "env": {"MARK": self.marker},
            "max_restarts": self.plan.restarts,
            "hang_timeout": HANG_TIMEOUT,
        }
        training = {"folder": str(self.folder), "steps": self.plan.steps, "pace": self.plan.pace}
        asked: dict[str, Any] = {"how": self.plan.how, "launcher": options, "train": training}
        if self.proxy:
            asked["proxy"] = {"port": self.proxy.port, "file": str(self.proxy.file)}
        with open(self.directory / "log", "ab") as log:
            submitter = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.submitter", json.dumps(asked)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env(),
            )
        self.submitters.append(submitter)
        return submitter

    def go(self) -> None:
        """Submits until there is a value, and hurts meanwhile."""
        limit = len(self.plan.faults) + 2
        try:
            while self.tries < limit:
                self.tries += 1
                self.try_began = time.monotonic()
                submitter = self.submit()
                self._follow(submitter)
                if (self.folder / "value").exists():
                    break
                self._take_error(submitter)
            else:
                self.problems.append(f"no value after {limit} tries")
            self.took = time.monotonic() - self.began
            self._end_faults()
            for submitter in self.submitters:
                try:
                    # One that came after the value was delivered trains from scratch, as it must.
                    submitter.wait(ROUND_BOUND)
                except subprocess.TimeoutExpired:
                    self.problems.append("a submitter did not end with its run")
            self._check()
        except TimeoutError as error:
            self.took = time.monotonic() - self.began
            self.problems.append(str(error))
            self._end_faults()
        finally:
            if self.proxy:
                self.proxy.close()
            self._clean()

    def _follow(self, submitter: subprocess.Popen[bytes]) -> None:
        """Until the submitter has ended."""
        while submitter.poll() is None:
            self._hurt(submitter)
            self._heal()
            if time.monotonic() - self.began > ROUND_BOUND:
                raise TimeoutError(f"the round took longer than {ROUND_BOUND} s")
            time.sleep(LOOK)

    def _take_error(self, submitter: subprocess.Popen[bytes]) -> None:
        file = self.folder / "error"
        struck = [fault for fault in self.plan.faults if fault.at and fault.try_number == self.tries]
        if not file.exists():
            killed = any(fault.target == "submitter" or self._is_own_driver(fault) for fault in struck)
            if not killed:
                self.problems.append(f"try {self.tries} ended by code {submitter.returncode} and said nothing")
            return
        error = json.loads(file.read_text())
        file.unlink()
        found = (error["type"], error.get("cause"))
        self.errors.append(f"{found[0]} {found[1] or ''}".strip())
        # A fault of the try before may show only now, in a run that lives on.
        explained: set[tuple[str, str | None]] = set()
        for fault in self.plan.faults:
            if fault.at:
                explained |= EXPLAINS.get((fault.kind, fault.target), set())
        if found not in explained:
            self.problems.append(f"try {self.tries} ended by {found}, which no fault explains: {error['message']}")

    def _is_own_driver(self, fault: Fault) -> bool:
        return self.plan.how == "run" and fault.target in ("driver", "submitter")

    # -- faults --------------------------------------------------------------------------------

    def _hurt(self, submitter: subprocess.Popen[bytes]) -> None:
        """Injects the faults whose moment has come, one after the other."""
        if not self.waiting:
            return
        fault = self.waiting[0]
        now = time.monotonic()
        if id(fault) not in self.armed:
            if not self._has_come(fault):
                return
            self.armed[id(fault)] = now + fault.delay
        if now < self.armed[id(fault)]:
            return
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if self._inject(fault, submitter):
                fault.at, fault.try_number = time.time(), self.tries
                self.waiting.pop(0)

    def _has_come(self, fault: Fault) -> bool:
        if fault.moment == "start":
            return True
        step = self.plan.steps - 1 if fault.moment == "end" else fault.step
        return kit.reported(self.folder) >= step

    def _inject(self, fault: Fault, submitter: subprocess.Popen[bytes]) -> bool:
        """True if there was somebody to hurt."""
        if fault.kind == "cancel":
            with contextlib.suppress(RunNotFoundError):
                handle = RunHandle.attach(self.run_directory)
                if handle.status().final:
                    return False
                handle.cancel()
                return True
            return False
        if fault.kind == "submit again":
            self.submit()
            return True
        if fault.target == "channel":
            return self._hurt_channel(fault)
        pid = self._find(fault, submitter)
        if pid is None:
            return False
        if fault.kind in ("pause", "stop"):
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + fault.length, pid))
        else:
            os.kill(pid, getattr(signal, fault.kind))
        return True

    def _hurt_channel(self, fault: Fault) -> bool:
        assert self.proxy
        if fault.kind == "cut":
            return self.proxy.cut() > 0
        if not self._processes("rankzero.agent.supervise"):
            return False
        self.proxy.deafen()
        self.heal_at = time.monotonic() + fault.length
        return True

    def _find(self, fault: Fault, submitter: subprocess.Popen[bytes]) -> int | None:
        if fault.target == "submitter":
            return submitter.pid
        if fault.target == "driver" and self.plan.how == "run":
            return submitter.pid if self._processes("rankzero.agent.supervise") else None
        words = {
            "worker": "rankzero.worker.main",
            "agent": "rankzero.agent.supervise",
            "driver": "rankzero.driver.main",
        }
        found = self._processes(words[fault.target])
        return found[int(fault.pick * len(found))] if found else None

    def _processes(self, words: str) -> list[int]:
        """Processes of this round whose command line has these words, oldest first."""
        found = []
        for pid in processes_with(self.marker):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(psutil.Process(pid).cmdline()):
                    found.append(pid)
        return sorted(found)

    def _heal(self) -> None:
        now = time.monotonic()
        if self.heal_at is not None and now > self.heal_at and self.proxy:
            self.heal_at = None
            self.proxy.heal()
        for item in [item for item in self.stopped if now > item[0]]:
            self.stopped.remove(item)
            with contextlib.suppress(ProcessLookupError):
                os.kill(item[1], signal.SIGCONT)

    def _end_faults(self) -> None:
        """What still stands still goes on: a stopped process cannot end."""
        if self.proxy:
            self.proxy.heal()
        for _, pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    # -- what must hold ------------------------------------------------------------------------

    def _check(self) -> None:
        left = wait_until_gone(self.marker, GONE)
        if left:
            self.problems.append(f"processes are left: {[describe(pid) for pid in left]}")
        if not (self.folder / "value").exists():
            return
        handle = RunHandle.attach(self.run_directory)
        value = json.loads((self.folder / "value").read_text())
        if value["value"] != expected(self.plan.steps, RANKS):
            self.problems.append(f"the value is wrong: {value}, not {expected(self.plan.steps, RANKS)}")
        if handle.status().state != "succeeded":
            self.problems.append(f"there is a value, and the run is {handle.status().state}")
        if (step := kit.newest_step(handle)) != self.plan.steps - 1:
            self.problems.append(f"the newest checkpoint is of step {step}")
        if (count := len(handle.checkpoints())) > 2:
            self.problems.append(f"{count} checkpoints are kept")
        self._check_history(value["history"])
        self._check_temp()

    def _check_history(self, history: list[list[int]]) -> None:
        attempts, firsts = [attempt for attempt, _ in history], [first for _, first in history]
        if attempts != sorted(set(attempts)) or firsts != sorted(firsts) or firsts[0] != 0:
            self.problems.append(f"the history makes no sense: {history}")
        stood_still = any(fault.at and fault.kind in ("pause", "stop", "deaf", "silence") for fault in self.plan.faults)
        if stood_still:
            return
        reports = [line.split() for line in (self.folder / "reports").read_text().splitlines()]
        for attempt, first in history[1:]:
            before = [(int(step), float(when)) for number, step, when in reports if int(number) < attempt]
            if not before:
                continue
            ended = max(when for _, when in before)
            safe = [step for step, when in before if when < ended - COMMIT_LAG]
            if safe and first <= max(safe):
                self.problems.append(f"attempt {attempt} began at step {first}, but {max(safe)} was long reported")

    def _check_temp(self) -> None:
        """Only the death of both agent and holder may leave a directory: nobody is there to remove it."""
        left = [path.name for path in self.temp.glob("rankzero-*")]
        killed = {fault.target for fault in self.plan.faults if fault.at and fault.kind in ("SIGKILL", "stop")}
        if left and not {"agent", "driver"} <= killed and not (self.plan.how == "run" and "submitter" in killed):
            self.problems.append(f"temporary directories are left: {sorted(left)}")

    def _clean(self) -> None:
        """Ends what a violation left, by its own id; the next round starts on a quiet machine."""
        for pid in processes_with(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for submitter in self.submitters:
            submitter.wait()


# -- the report --------------------------------------------------------------------------------


@dataclass
class Report:
    """What the rounds came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    tries: int = 0
    missed: int = 0
    violations: int = 0

    def add(self, done: Round) -> None:
        """Counts a round."""
        self.tries += done.tries
        self.missed += sum(fault.at is None for fault in done.plan.faults)
        self.faults.update(f"{fault.kind} of {fault.target}" for fault in done.plan.faults if fault.at is not None)
        self.errors.update(done.errors)
        self.seconds.append(done.took)
        self.violations += bool(done.problems)

    def to_markdown(self) -> str:
        """Returns the numbers of the whole soak as a table."""
        rows = {
            "seed": self.seed,
            "runs": len(self.seconds),
            "violations": self.violations,
            "faults injected": self.faults.total(),
            "faults whose moment did not come": self.missed,
            "submissions of all runs": self.tries,
            "seconds of the slowest run": round(max(self.seconds, default=0.0), 1),
        }
        counts = [*rows.items(), *self.faults.most_common(), *self.errors.most_common()]
        return "\n".join(["| soak | |", "|---|---|", *(f"| {name} | {value} |" for name, value in counts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="end after so many faults")
    parser.add_argument("--minutes", type=float, default=30.0, help="or after so many minutes")
    parser.add_argument("--seed", type=int, default=None, help="of the plan; drawn and printed if not given")
    parser.add_argument("--only", type=int, help="one round of the plan, by its number")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 16)
    report = Report(seed)
    end = time.monotonic() + 60 * arguments.minutes
    number = arguments.only or 0
    print(f"seed {seed} on {socket.gethostname()}", flush=True)
    while report.faults.total() < arguments.faults and time.monotonic() < end:
        plan = make_plan(seed, number)
        # Short: torch's sockets lie below it.
        directory = Path(tempfile.mkdtemp(prefix="soak-"))
        done = Round(plan, directory)
        done.go()
        report.add(done)
        faults = ", ".join(
            f"{fault.kind} {fault.target} ({fault.moment})" for fault in plan.faults if fault.at is not None
        )
        print(f"{number:4} {plan.how:6} {done.took:6.1f} s {done.tries} tries  {faults}", flush=True)
        if done.problems:
            print(f"VIOLATION, again with: --seed {seed} --only {number}\n  kept: {directory}", flush=True)
            print("\n".join(f"  {problem}" for problem in done.problems), flush=True)
            print(f"  {json.dumps(asdict(plan))}", flush=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
        if arguments.only is not None:
            break
        number += 1
    print(f"\n{report.to_markdown()}")
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
