"""The table of `docs/tries.md`, and the training whose tries a test of an orchestrator runs row by row."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.conftest import ROOT, processes_with, until, wait_until_gone

from rankzero import ResultRef, RunHandle

PAGE = ROOT / "docs" / "tries.md"
HEADER = ["what happens", "Airflow", "Dagster", "the training"]
OUTCOMES = {"attaches", "delivered", "resumes", "from scratch", "ends"}
WAIT = 120.0


@dataclass(frozen=True)
class Row:
    """What happens, by its anchor, and what becomes of the training, the word in bold of the last column."""

    name: str
    outcome: str

    def __str__(self) -> str:
        return self.name


def rows() -> list[Row]:
    """Every row of the first table. Raises AssertionError for one without an anchor or a known outcome."""
    first = PAGE.read_text().partition("\n## ")[0]
    table = [line for line in first.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == HEADER
    found = []
    for what, airflow, dagster, training in cells[2:]:
        anchor = re.match(r'<a id="([a-z-]+)"></a>\w', what)
        outcome = re.search(r"\*\*(.+?)\*\*", training)
        assert anchor, what
        assert airflow, what
        assert dagster, what
        assert outcome, what
        assert outcome[1] in OUTCOMES, what
        found.append(Row(anchor[1], outcome[1]))
    return found


def assert_each_has_a_scenario(scenarios: Iterable[str]) -> None:
    """Raises AssertionError for a row without a scenario, and for a scenario without a row."""
    names = [row.name for row in rows()]
    assert sorted(scenarios) == sorted(names)
    assert len(set(names)) == len(names)


def train(folder: str, lr: float = 0.1, given: Any = None) -> dict[str, int]:
    """Notes where it begins, and reports a checkpoint; fails or ends when the folder says so."""
    import os
    import time
    from pathlib import Path

    import rankzero.train as rt

    with contextlib.suppress(ImportError):
        # `Place.deploy`
        import deployed_with_the_pipeline  # noqa: F401

    checkpoint = rt.get_checkpoint()
    epoch = checkpoint.load()["epoch"] if checkpoint else 0
    rt.report({"epoch": epoch}, checkpoint={"epoch": epoch + 1})
    if rt.get_context().rank == 0:
        with Path(folder, "begun").open("a") as begun:
            begun.write(f'{{"pid": {os.getpid()}, "epoch": {epoch}}}\n')
    while True:
        if Path(folder, "fail").exists():
            Path(folder, "fail").unlink()
            raise ValueError("told to fail")
        if Path(folder, "end").exists():
            break
        time.sleep(0.02)
    return {"pid": os.getpid(), "epoch": epoch}


def train_otherwise(folder: str, lr: float = 0.1, given: Any = None) -> dict[str, int]:
    """Other code."""
    return {**train(folder, lr, given), "other": 1}


def data_in(folder: str, place: str) -> ResultRef:
    """The same data, wherever."""
    return ResultRef.save({"rows": [1, 2, 3]}, os.path.join(folder, place))


@dataclass
class Place:
    """A folder: the training waits there for what to do, and notes there what it did.

    Attributes:
        folder: Of the test.
        mark: In the environment of ranks only, as ``OF_RANK``.
    """

    folder: Path
    mark: str

    @property
    def store(self) -> str:
        return str(self.folder / "runs")

    def let(self, *words: str) -> None:
        """Has it ``fail``, once, or ``end``."""
        for word in words:
            (self.folder / word).touch()

    def deploy(self, version: int) -> None:
        """Deploys a module that the training imports."""
        path = self.folder / "deployed_with_the_pipeline.py"
        path.write_text(f"VERSION = {version}\n")
        # Two versions may fall into one tick of the file system's clock.
        os.utime(path, (version, version))

    @contextlib.contextmanager
    def beside(self, action: Callable[[], object], *, ends: bool = False) -> Iterator[None]:
        """Does something while the block runs a try; lets the training end after that if asked to, or if that fails."""
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(action)
            acting.add_done_callback(lambda done: self.let("end") if ends or done.exception() else None)
            yield
        acting.result()

    def begun(self) -> list[dict[str, int]]:
        """Process and epoch of each beginning, in order."""
        notes = self.folder / "begun"
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []

    def runs(self) -> list[RunHandle[Any]]:
        return [RunHandle.attach(folder.parent) for folder in Path(self.store).glob("*/submissions")]

    def run(self) -> RunHandle[Any]:
        (handle,) = self.runs()
        return handle

    def lease(self) -> bytes:
        """What the last follower wrote: with no follower, it stays until a try attaches or submits the run again."""
        return self.run().own.lease()

    def ranks(self) -> set[int]:
        return set(processes_with(f"OF_RANK={self.mark}"))

    def await_training(self) -> set[int]:
        """The processes of its ranks, once it has a checkpoint."""
        until(self.begun, WAIT, "a training")
        until(lambda: self.run().status().checkpoint, WAIT, "a checkpoint")
        return self.ranks()

    def assert_outcome(self, outcome: str, result: dict[str, int] | None) -> None:
        """After everything: what became of the training.

        Args:
            outcome: One of `OUTCOMES`.
            result: What the orchestrator has in the end.
        """
        begun = self.begun()
        submissions = sum(handle.job.submission + 1 for handle in self.runs())
        if outcome == "ends":
            assert wait_until_gone(f"OF_RANK={self.mark}") == []
            assert self.run().status().state == "cancelled"
            assert result is None
        else:
            assert result
            assert result["pid"] == begun[-1]["pid"]
        beginnings = {"resumes": [0, 1], "from scratch": [0, 0]}.get(outcome, [0])
        assert [each["epoch"] for each in begun] == beginnings
        assert submissions == len(beginnings)


class Orchestrator(Protocol):
    """A pipeline of one step that trains, in an orchestrator."""

    place: Place

    def execute(self, *, retries: int = 0) -> bool:
        """Executes the pipeline; returns True if it has succeeded."""

    def execute_again(self, **changed: Any) -> bool:
        """Does what a user does who wants the step again; returns True if it has succeeded."""

    def storing_fails_once(self) -> contextlib.AbstractContextManager[Any]:
        """Has the orchestrator fail to store the next result."""


def _failed_then(**changed: Any) -> Callable[[Orchestrator], None]:
    def scenario(it: Orchestrator) -> None:
        it.place.let("fail", "end")
        assert not it.execute()
        assert it.execute_again(**changed)

    return scenario


def _failed_then_deployed(it: Orchestrator) -> None:
    it.place.deploy(1)
    it.place.let("fail", "end")
    assert not it.execute()
    it.place.deploy(2)
    assert it.execute_again()


def _retry(it: Orchestrator) -> None:
    it.place.let("fail", "end")
    assert it.execute(retries=1)


def _succeeded(it: Orchestrator) -> None:
    it.place.let("end")
    assert it.execute()
    assert it.execute_again()


def _new_run(it: Orchestrator) -> None:
    it.place.let("fail", "end")
    assert not it.execute()
    assert it.execute()


def _unstored_retry(it: Orchestrator) -> None:
    it.place.let("end")
    with it.storing_fails_once():
        assert it.execute(retries=1)


def _unstored(it: Orchestrator) -> None:
    it.place.let("end")
    with it.storing_fails_once():
        assert not it.execute()
    assert it.execute_again()


SCENARIOS: dict[str, Callable[[Any], None]] = {
    "retry": _retry,
    "failed": _failed_then(),
    "failed-deployed": _failed_then_deployed,
    "failed-other-arguments": _failed_then(lr=0.01),
    "failed-other-code": _failed_then(train="train_otherwise"),
    "failed-other-ranks": _failed_then(num_processes=2),
    "failed-equal-data": _failed_then(data="there"),
    "succeeded": _succeeded,
    "new-run": _new_run,
    "unstored-retry": _unstored_retry,
    "unstored": _unstored,
}
"""The rows in which both orchestrators do the same; each adds those in which a process dies or a user ends a run."""

SOAK = {"failed-other-code", "failed-other-ranks", "failed-equal-data", "failed-deployed"}
"""What they do there is the same as for other arguments; the identity is core's, and has tests of its own."""
