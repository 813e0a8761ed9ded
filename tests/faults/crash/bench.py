"""`Bench`: runs a scenario with one process killed at one point, recovers as a user would, and checks what is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.conftest import ORPHAN_TIMEOUT, describe, wait_until_gone
from tests.faults.crash.program import RUN, STEPS

from rankzero import RunHandle, RunNotFoundError, store
from rankzero.run.status import RunStatus
from rankzero.store.upkeep import UNFINISHED_AFTER

FOLDER = Path(__file__).parent

ACTION_TIMEOUT = 180.0  # Seconds for one action, however it was hurt

READ_TIMEOUT = 2.0
"""Seconds for which a client waits for an answer of the store, by default 15. A late answer comes after 7 s."""

Point = tuple[str, str]
"""The name of an operation, and ``"before"`` or ``"after"``; or that of a request, and one of `ANSWERS`."""

ANSWERS = ("late", "403", "503", "500", "never")
"""Wrong answers of a store: later than its client waits, refused, busy, an error although it was done, or none."""

_READS = re.compile(r" send (GET|HEAD) ")


@dataclass(frozen=True)
class Scenario:
    """What is done, and how it is recovered.

    Attributes:
        before: Actions that complete before the process is killed, as ``role action``.
        act: The action with the points.
        then: Actions after it, of which each must have the value that stands beside it.
        go: True if the ranks may end after `act`.
        from_scratch: True if `act` rightly begins from scratch beside a checkpoint that is there.
    """

    act: str
    then: Mapping[str, Any]
    before: tuple[str, ...] = ()
    go: bool = False
    from_scratch: bool = False


_VALUE = {"value": STEPS}

SCENARIOS = {
    "run": Scenario("submitter plain-run", {"submitter plain-run": _VALUE}),
    "submit": Scenario("submitter plain-deliver", {"submitter plain-deliver": _VALUE}),
    "attach": Scenario("reader long-attach", {"submitter long-deliver": _VALUE}, ("submitter long-submit",), go=True),
    "failure": Scenario("submitter fails-run", {"submitter fails-run": _VALUE}, go=True),
    "restart": Scenario("submitter dies-run", {"submitter dies-run": _VALUE}),
    "detached restart": Scenario("submitter dies-deliver", {"submitter dies-deliver": _VALUE}),
    "cancel": Scenario(
        "canceller long-cancel",
        {"canceller long-cancel": {"value": "ended"}, "submitter long-deliver": _VALUE},
        before=("submitter long-submit",),
        go=True,
    ),
    "resubmit": Scenario(
        "submitter plain-deliver", {"submitter plain-deliver": _VALUE}, ("submitter plain-deliver",), from_scratch=True
    ),
    "gc": Scenario(
        "collector plain-gc",
        {"collector plain-gc": {"value": "collected"}, "submitter plain-run": _VALUE},
        before=("submitter plain-run",),
        from_scratch=True,
    ),
    "rows": Scenario("submitter rows-run", {"submitter rows-run": {"value": 2 * STEPS}}),
    "sharded": Scenario("submitter sharded-run", {"submitter sharded-run": _VALUE}),
}


class Violation(AssertionError):
    """Something was lost, is wrong, or is left."""


@dataclass
class Promise:
    """What a reader saw after the kill: the next try has to keep it.

    Attributes:
        status: The status of the run; None if there is no run.
        step: The step of the newest committed checkpoint; -1 if there is none.
        delivered: True if the caller had acknowledged the result: then the next submission begins from scratch.
        begun: How often each rank had begun until then.
    """

    status: RunStatus | None = None
    step: int = -1
    delivered: bool = False
    begun: tuple[int, ...] = ()


@dataclass
class Bench:
    """A folder in which scenarios run one after the other, each in a store of its own.

    Attributes:
        folder: The folder; it holds the shim, the store of a local scenario, and the temporary files.
        notes: A folder that no point watches.
        root: The URL of a bucket for the stores; None for a local path.
        marker: Marks the processes.
    """

    folder: Path
    notes: Path
    marker: str
    root: str | None = None
    _number: int = 0
    _is_warm: bool = False
    _programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.copytree(FOLDER / "hook", self.folder / "hook", ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "tmp").mkdir()
        # Benches side by side have no number in common.
        self._number = os.getpid() * 10_000 % 100_000_000

    def record(self, scenario: Scenario) -> list[str]:
        """Returns the names of the points of a scenario, in their order."""
        found = self.notes / "points"
        found.unlink(missing_ok=True)
        if not self._is_warm:
            # It starts the process that forks the zygotes of the others.
            self._run(scenario, {})
            self._is_warm = True
        self._run(scenario, {"record": str(found)})
        return list(dict.fromkeys(found.read_text().splitlines()))

    def hurt(self, scenario: Scenario, point: str, what: str) -> bool:
        """Runs a scenario with one process killed at a point, or one request answered wrongly.

        Returns:
            False if no process came to the point.

        Raises:
            Violation: says what was lost, is wrong, or is left.
        """
        try:
            return self._run(scenario, {"point": point, "what": what})
        finally:
            for pid in wait_until_gone(self.marker, 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for path in self._temporary():
                shutil.rmtree(path, ignore_errors=True)

    def _run(self, scenario: Scenario, plan: dict[str, str]) -> bool:
        self._number += 1
        # Digits that the shim leaves out of the names of points.
        root = f"{self.root or self.folder}/store-{self._number:08d}"
        notes = self.notes / str(self._number)
        notes.mkdir()
        reached = self.folder / "hook" / "reached"
        reached.unlink(missing_ok=True)
        for action in scenario.before:
            self._do(action, root, notes)
        self._write_plan(plan)
        try:
            found = self._do(scenario.act, root, notes, releases=scenario.go and "attach" in scenario.act)
        finally:
            (self.folder / "hook" / "plan.json").unlink()
        if found is None and plan.get("what") in ANSWERS:
            raise Violation(f"{scenario.act} gave no value and no typed error:\n{_tail(notes)}")
        promise = self._promise(root, notes)
        if scenario.go:
            (notes / "go").touch()
        self._age(root)
        for action, expected in scenario.then.items():
            was_reached = reached.exists()
            found = self._do(action, root, notes)
            if reached.exists() and not was_reached and not (found == expected and "deliver" in action):
                # The process came to the point only now; a retry resumes. After a delivered value it would train again.
                found = self._do(action, root, notes)
            if found != expected:
                raise Violation(f"{action} gave {found}, expected {expected}:\n{_tail(notes)}")
        self._check_kept(promise, notes, scenario)
        if reached.exists() and self._is_left(root):
            # A driver that was killed after its caller had the value left its file when the hour had passed already.
            self._age(root)
            self._do(list(scenario.then)[-1], root, notes)
        if self._temporary():
            # What a killed run has left the next one on its host removes.
            self._do("submitter plain-run", f"{root}-next", notes)
            store.remove(f"{root}-next")
        self._check_left(root)
        store.remove(root)
        shutil.rmtree(notes)
        return reached.exists()

    def _write_plan(self, plan: dict[str, str]) -> None:
        temporary = self.folder / "hook" / "plan.new"
        temporary.write_text(json.dumps(plan))
        temporary.replace(self.folder / "hook" / "plan.json")

    def _do(self, action: str, root: str, notes: Path, *, releases: bool = False) -> dict[str, Any] | None:
        """Runs one action in a process of its own; returns its value or error, None if it was killed."""
        role, what = action.split()
        value = notes / "value"
        value.unlink(missing_ok=True)
        stdin, stdout = self._program()
        stdin.write(f"{role} {what} {root} {notes} {self.marker}\n".encode())
        pid = int(stdout.readline())
        if releases:
            (notes / "go").touch()
        in_time: list[Any] = []
        try:
            in_time = select.select([stdout], [], [], ACTION_TIMEOUT)[0]
        finally:
            # Also if the test is over its time: the next one must not read the end of this action as its own.
            if not in_time:
                os.kill(pid, signal.SIGKILL)
            stdout.readline()
        if not in_time:
            raise Violation(f"{action} takes longer than {ACTION_TIMEOUT:g} s")
        return json.loads(value.read_text()) if value.exists() else None

    def _program(self) -> tuple[IO[bytes], IO[bytes]]:
        """Returns the pipes to the program that forks a process for each action; it ends with this process."""
        if not self._programs:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(self.folder / "hook"), str(FOLDER.parents[2])]),
                "TMPDIR": str(self.folder / "tmp"),
                "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": READ_TIMEOUT}}),
            }
            command = [sys.executable, str(FOLDER / "program.py")]
            pipe = subprocess.PIPE
            # Unbuffered: a line that is in a buffer here is not seen by `select`.
            self._programs.append(subprocess.Popen(command, bufsize=0, env=environment, stdin=pipe, stdout=pipe))
        program = self._programs[0]
        assert program.stdin
        assert program.stdout
        return program.stdin, program.stdout

    def close(self) -> None:
        """Ends the program."""
        for program in self._programs:
            program.communicate()

    def _promise(self, root: str, notes: Path) -> Promise:
        begun = tuple(len(lines) for lines in _begun(notes))
        with contextlib.suppress(RunNotFoundError):
            handle: RunHandle[Any] = RunHandle.attach(f"{root}/{RUN}")
            manifests = handle.checkpoints()
            status = handle.status()
            delivered = handle.delivery().acknowledged
            return Promise(status, int(manifests[-1].metrics["step"]) if manifests else -1, delivered, begun)
        return Promise(begun=begun)

    def _check_kept(self, promise: Promise, notes: Path, scenario: Scenario) -> None:
        if scenario.from_scratch or promise.delivered:
            return
        status = promise.status
        # A rank of the attempt that was hurt may begin while it is being ended.
        hurt = status.attempt if status else -1
        begun = zip(_begun(notes), promise.begun, strict=True)
        after = [[step for attempt, step in lines[before:] if attempt > hurt] for lines, before in begun]
        if status and status.certain and (status.result or status.state == "succeeded") and any(after):
            raise Violation(f"the run had succeeded, and its ranks trained again from steps {after}")
        if any(first <= promise.step for steps in after for first in steps):
            raise Violation(f"the checkpoint of step {promise.step} was there, and ranks began at steps {after}")

    def _check_left(self, root: str) -> None:
        deadline = time.monotonic() + ORPHAN_TIMEOUT
        while (left := self._left(root)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            raise Violation(f"left behind: {left}")

    def _is_left(self, root: str) -> bool:
        """Returns True if files under temporary names are there when the scenario's processes have ended."""
        wait_until_gone(self.marker)
        return not store.is_url(root) and bool(_unfinished(root))

    def _age(self, root: str) -> None:
        """Lets the time pass after which the files of killed processes are removed."""
        then = time.time() - UNFINISHED_AFTER() - 60
        for path in [*self._temporary(), *([] if store.is_url(root) else _unfinished(root))]:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (then, then))

    def _temporary(self) -> list[Path]:
        # Python itself probes the folder with files of eight characters.
        return [path for path in (self.folder / "tmp").iterdir() if not re.fullmatch("[a-z0-9_]{8}", path.name)]

    def _left(self, root: str) -> list[str]:
        found = list(map(describe, wait_until_gone(self.marker, 0)))
        found += map(str, self._temporary())
        if not store.is_url(root):
            found += map(str, _unfinished(root))
        return found


def _tail(notes: Path) -> str:
    return (notes / "log").read_text()[-2000:]


def _unfinished(root: str) -> list[Path]:
    """Files under temporary names; those of a live process are gone in a moment."""
    return [path for name in (".writing-*", "*.writing", ".committing-*", "*probe*") for path in Path(root).rglob(name)]


def _begun(notes: Path) -> list[list[tuple[int, int]]]:
    """The attempt and the step at which each rank began."""
    lines = [_lines(notes / f"began-{rank}") for rank in (0, 1)]
    return [[(int(line.split()[0]), int(line.split()[1])) for line in of_rank] for of_rank in lines]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def points_of(names: Sequence[str]) -> list[Point]:
    """Returns the point before the first operation of each role, and the one after each operation.

    Between two operations of a process its files and peers are in one state, so one point stands for both sides. A
    request that only reads leaves that state as it is, and adds no point.
    """
    roles: set[str] = set()
    points = []
    for name in names:
        if _READS.search(name):
            continue
        if (role := name.split()[0]) not in roles:
            roles.add(role)
            points.append((name, "before"))
        points.append((name, "after"))
    return points


def answers_of(names: Sequence[str]) -> list[Point]:
    """Returns each request to an object store with each wrong answer."""
    requests = [name for name in names if re.search(r" send (GET|PUT|POST|DELETE|HEAD) ", name)]
    return [(name, answer) for name in requests for answer in ANSWERS]


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Returns so many points at equal distances."""
    return [points[(2 * number + 1) * len(points) // (2 * count)] for number in range(min(count, len(points)))]
