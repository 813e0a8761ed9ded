"""Trainings in a real `dagster dev` (webserver, daemon, code server): launched, watched, killed, terminated.

It runs in a terminal, and ends by Ctrl-C in the last test.
"""

import itertools
import os
import pty
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import processes_with, wait_until_gone
from tests.dagster.deployment import FINAL, RUN_TIMEOUT, Deployment, wait_until
from tests.dagster.durable_training import FOLDER_TAG

from rankzero import RunHandle

DEFINITIONS = Path(__file__).parent / "durable_training.py"

AT_TERMINAL = ["bash", "-c", 'exec "$@" <"$0"']
"""The leader of a session gets the terminal that it opens first."""

JOB_CONTROL = ["bash", "-m", "-c", '"$@"; exit $?', "bash"]
"""The program is a process group of its own, which a key reaches and the shell's end does not."""


def mark_of(root: Path) -> str:
    """What ranks carry in their environment."""
    return f"of-{root.name}-{os.getpid()}"


@dataclass
class Launched:
    """A Dagster run whose training waits for a word."""

    dagster: Deployment
    root: Path
    folder: Path
    run_id: str

    @property
    def rank_mark(self) -> str:
        return f"OF_RANK={mark_of(self.root)}"

    def training(self) -> RunHandle[Any]:
        (job,) = (self.root / "runs").glob(f"{self.run_id[:8]}-*/submissions/0.json")
        return RunHandle.attach(job.parents[1])

    def await_ranks(self) -> set[int]:
        looks = itertools.count()

        def trains() -> bool:
            # A request to the webserver costs as much as forty looks at the directory.
            assert next(looks) % 20 or self.dagster.status(self.run_id) not in FINAL
            begun = any((self.root / "runs").glob(f"{self.run_id[:8]}-*/submissions/0.json"))
            return begun and self.training().status().checkpoint is not None

        wait_until(trains, RUN_TIMEOUT, "ranks that train")
        return set(processes_with(self.rank_mark))

    def await_end(self) -> None:
        wait_until(lambda: self.training().status().final, RUN_TIMEOUT, "the end of the training")

    def let_go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dagster")


@pytest.fixture(scope="module")
def terminal() -> tuple[int, int]:
    """Returns the keyboard and the screen of a terminal."""
    return pty.openpty()


@pytest.fixture(scope="module")
def dagster(root: Path, terminal: tuple[int, int]) -> Iterator[Deployment]:
    """`dagster dev` with an instance of its own; nothing of it is left afterwards."""
    home = root / "home"
    home.mkdir()
    variables = {
        "TEST_STORE": str(root / "runs"),
        "TEST_ASSETS": str(root / "assets"),
        # Only ranks get the resource's `env`; everything that is started here carries another mark.
        "TEST_RANK_MARK": mark_of(root),
    }
    deployment = Deployment(home, DEFINITIONS, variables, [*AT_TERMINAL, os.ttyname(terminal[1]), *JOB_CONTROL])
    try:
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture
def launch(dagster: Deployment, root: Path, tmp_path: Path) -> Iterator[Any]:
    """Launches jobs; their ranks have exited at the end."""
    launched: list[Launched] = []

    def start(job: str, **tags: str) -> Launched:
        run_id = dagster.launch(job, {FOLDER_TAG: str(tmp_path), **{f"dagster/{key}": tags[key] for key in tags}})
        launched.append(Launched(dagster, root, tmp_path, run_id))
        return launched[-1]

    yield start
    for each in launched:
        assert wait_until_gone(each.rank_mark) == []


@pytest.fixture
def instance(dagster: Deployment) -> Iterator[dg.DagsterInstance]:
    """Its storage."""
    with dg.DagsterInstance.from_config(str(dagster.home)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("job", "asset"),
    [
        pytest.param("fragile_job", "fragile", id="the run would die with its step"),
        # The same job is ended in `test_ctrl_c_of_dagster_dev_ends_the_trainings_of_its_runs`.
        pytest.param("durable_job", "durable", id="the run would outlive its step", marks=pytest.mark.soak),
    ],
)
def test_terminating_a_run_ends_its_ranks_and_stores_nothing(
    launch: Any, dagster: Deployment, instance: dg.DagsterInstance, job: str, asset: str
) -> None:
    launched = launch(job)
    assert launched.await_ranks()

    dagster.terminate(launched.run_id)
    # How soon is measured by benchmarks/dagster_cancel.py.
    launched.await_end()
    assert wait_until_gone(launched.rank_mark) == []

    assert dagster.finish(launched.run_id) == "CANCELED"
    assert instance.get_latest_materialization_event(dg.AssetKey(asset)) is None
    assert launched.training().status().state == "cancelled"
    assert launched.training().job.submission == 0


@pytest.mark.parametrize(
    ("job", "tags"),
    [
        pytest.param("durable_job", {}, id="the step"),
        # Whose step has no retry policy.
        pytest.param("fragile_job", {"max_retries": "1"}, id="the run", marks=pytest.mark.soak),
    ],
)
def test_a_step_that_was_killed_is_retried_and_takes_its_training_up(
    launch: Any, dagster: Deployment, job: str, tags: dict[str, str]
) -> None:
    launched = launch(job, **tags)
    ranks = launched.await_ranks()
    before, again = set(dagster.runs_of(job)), launched.run_id
    os.kill(int((launched.folder / "step-0").read_text()), signal.SIGKILL)
    if tags:
        (again,) = wait_until(lambda: set(dagster.runs_of(job)) - before, RUN_TIMEOUT, "the next run")
        wait_until(lambda: dagster.status(again) == "STARTED", RUN_TIMEOUT, "its start")
    else:
        wait_until((launched.folder / "step-1").exists, RUN_TIMEOUT, "the next try")
    assert ranks <= set(processes_with(launched.rank_mark))
    launched.let_go()
    assert dagster.finish(again) == "SUCCESS"
    assert dagster.status(launched.run_id) == ("FAILURE" if tags else "SUCCESS")
    assert launched.training().job.submission == 0
    assert launched.training().result()["pid"] in ranks


def test_ctrl_c_of_dagster_dev_ends_the_trainings_of_its_runs(
    launch: Any, dagster: Deployment, terminal: tuple[int, int]
) -> None:
    # A person at a terminal wants the end of everything, although the run could be started again.
    launched = launch("durable_job", max_retries="1")
    assert launched.await_ranks()
    os.write(terminal[0], b"\x03")
    wait_until(lambda: dagster.server.poll() is not None, RUN_TIMEOUT, "the end of dagster dev")
    assert wait_until_gone(launched.rank_mark, RUN_TIMEOUT) == []
    # Its driver writes that after the ranks have ended, and is no part of dagster dev.
    launched.await_end()
    assert launched.training().status().state == "cancelled"
    # One key was enough: no other try began.
    assert launched.training().job.submission == 0
    assert not (launched.folder / "step-1").exists()
    # The webserver, the daemon and the code server have ended, too.
    assert wait_until_gone(dagster.marker, RUN_TIMEOUT) == []
