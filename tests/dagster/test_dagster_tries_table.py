"""Every row of the table in `docs/tries.md`, with Dagster, and what else ends or delivers a training of a step."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import ROOT, until, wait_until_gone
from tests.tries import tries_table
from tests.tries.tries_table import WAIT, Place, Row, assert_each_has_a_scenario, data_in, rows

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource


class Asked(dg.Config):
    """What a re-execution may change."""

    train: str = "train"
    lr: float = 0.1
    data: str = "here"
    num_processes: int = 1


class FailingIOManager(RankZeroIOManager):
    """Does not store once, if there is a file ``unstorable``."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        told = Path(os.environ["TEST_FOLDER"], "unstorable")
        if told.exists():
            told.unlink()
            raise OSError("the store of assets is away")
        super().handle_output(context, obj)


def body(context: dg.AssetExecutionContext, config: Asked, torch_distributor: TorchDistributorResource) -> Any:
    """Notes its process for each try; a try after the first waits while there is a file ``hold``."""
    folder = os.environ["TEST_FOLDER"]
    if folder not in sys.path:
        # The module of `Place.deploy`; not by a variable, for which the ranks would need a zygote of their own.
        sys.path.insert(0, folder)
    Path(folder, f"step-{context.retry_number}").write_text(str(os.getpid()))
    if context.retry_number and Path(folder, "hold").exists():
        until(lambda: not Path(folder, "hold").exists(), WAIT, "the end of the first training")
    launched = torch_distributor.options(num_processes=config.num_processes)
    given = data_in(folder, config.data)
    lr = config.lr + context.retry_number if Path(folder, "unsteady").exists() else config.lr
    return launched.run(context, getattr(tries_table, config.train), folder, lr=lr, given=given)


once = dg.asset(body, name="once")
retried = dg.asset(body, name="retried", retry_policy=dg.RetryPolicy(max_retries=1))
patient = dg.asset(body, name="patient", retry_policy=dg.RetryPolicy(max_retries=1, delay=600))

defs = dg.Definitions(
    assets=[once, retried, patient],
    jobs=[
        dg.define_asset_job("once_job", selection=[once], executor_def=dg.in_process_executor),
        dg.define_asset_job("retried_job", selection=[retried], executor_def=dg.in_process_executor),
        dg.define_asset_job("apart_job", selection=[retried], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("once_apart_job", selection=[once], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("patient_job", selection=[patient], executor_def=dg.multiprocess_executor),
    ],
    resources={
        "torch_distributor": TorchDistributorResource(
            engine="local",
            store=dg.EnvVar("TEST_STORE"),
            env={"OF_RANK": dg.EnvVar("TEST_RANK_MARK")},
            retry_user_errors=True,
            observation_interval=None,
            # Time for the write of what was reported right before a failure.
            stop_grace=60,
        ),
        "io_manager": FailingIOManager(base_path=dg.EnvVar("TEST_ASSETS")),
    },
)


def once_job() -> dg.JobDefinition:
    """Without retries."""
    return defs.resolve_job_def("once_job")


def retried_job() -> dg.JobDefinition:
    """With one, in the same process."""
    return defs.resolve_job_def("retried_job")


def apart_job() -> dg.JobDefinition:
    """With one, each try in a process of its own."""
    return defs.resolve_job_def("apart_job")


def once_apart_job() -> dg.JobDefinition:
    """Without retries, in a process of its own."""
    return defs.resolve_job_def("once_apart_job")


def patient_job() -> dg.JobDefinition:
    """With ten minutes before the retry."""
    return defs.resolve_job_def("patient_job")


class Dagster:
    """Executes jobs in this process, on an instance with a home."""

    def __init__(self, place: Place, instance: dg.DagsterInstance) -> None:
        self.place = place
        self.instance = instance
        self.results: list[dg.JobExecutionResult] = []

    def execute(self, job: Callable[[], dg.JobDefinition] | None = None, *, retries: int = 0) -> bool:
        """A new run; True if it has succeeded."""
        return self._execute(job or (retried_job if retries else once_job), None, {})

    def execute_again(self, of: int = -1, job: Callable[[], dg.JobDefinition] = once_job, **asked: Any) -> bool:
        """Re-executes a run, the last one if none is named; from its failure if nothing is changed."""
        run = self.instance.get_run_by_id(self.results[of].run_id)
        options = dg.ReexecutionOptions(parent_run_id=run.run_id)
        if run.status is dg.DagsterRunStatus.FAILURE and not asked:
            options = dg.ReexecutionOptions.from_failure(run.run_id, self.instance)
        return self._execute(job, options, asked)

    @contextlib.contextmanager
    def storing_fails_once(self) -> Iterator[None]:
        """Has `FailingIOManager` fail, which removes the file."""
        self.place.let("unstorable")
        yield
        assert not (self.place.folder / "unstorable").exists()

    def _execute(
        self, job: Callable[[], dg.JobDefinition], options: dg.ReexecutionOptions | None, asked: dict[str, Any]
    ) -> bool:
        name = "once" if job in (once_job, once_apart_job) else "retried"
        config = {"ops": {name: {"config": asked}}}
        recon = dg.reconstructable(job)
        with dg.execute_job(recon, self.instance, run_config=config, reexecution_options=options) as result:
            self.results.append(result)
        return result.success

    def stored(self) -> dict[str, int] | None:
        """What the IO manager has of the last run."""
        if not self.results[-1].success:
            return None
        (asset,) = self.results[-1].job_def.asset_layer.executable_asset_keys
        return dict(defs.load_asset_value(asset, instance=self.instance))

    def kill_step(self, number: signal.Signals = signal.SIGKILL) -> set[int]:
        """Ends the process of the first try once its ranks train; the ranks."""
        ranks = self.place.await_training()
        os.kill(int((self.place.folder / "step-0").read_text()), number)
        return ranks

    def terminate(self) -> None:
        """What Dagster's launcher does: it marks the run, and interrupts its process."""
        self.place.await_training()
        (run,) = self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        self.instance.report_run_canceling(run)
        os.kill(os.getpid(), signal.SIGINT)


def killed(
    dagster: Dagster, meanwhile: Callable[[], None] = lambda: None, number: signal.Signals = signal.SIGKILL
) -> None:
    place = dagster.place

    def kill() -> None:
        place.await_training()
        meanwhile()
        place.let("hold")
        ranks = dagster.kill_step(number)
        until((place.folder / "step-1").exists, WAIT, "the next try")
        left = place.lease()
        (place.folder / "hold").unlink()
        until(lambda: place.lease() != left, WAIT, "a follower")
        assert ranks <= place.ranks()
        place.let("end")

    with dagster.place.beside(kill):
        assert dagster.execute(apart_job)


def killed_with_other_arguments(dagster: Dagster) -> None:
    dagster.place.let("unsteady")
    # As an evicted pod ends, or a process that a person ends.
    killed(dagster, number=signal.SIGTERM)


def deployed(dagster: Dagster) -> None:
    dagster.place.deploy(1)
    killed(dagster, lambda: dagster.place.deploy(2))


def ended_meanwhile(dagster: Dagster) -> None:
    place = dagster.place
    place.let("hold")

    def kill() -> None:
        dagster.kill_step()
        place.let("end")
        until(lambda: place.run().status().final, WAIT, "the end of the training")
        (place.folder / "hold").unlink()

    with dagster.place.beside(kill):
        assert dagster.execute(apart_job)


def ended(dagster: Dagster) -> None:
    with dagster.place.beside(dagster.terminate):
        assert not dagster.execute()


def ended_then(**asked: Any) -> Callable[[Dagster], None]:
    def scenario(dagster: Dagster) -> None:
        ended(dagster)
        assert wait_until_gone(f"OF_RANK={dagster.place.mark}") == []
        dagster.place.let("end")
        assert dagster.execute_again(**asked)

    return scenario


SCENARIOS: dict[str, Callable[[Dagster], None]] = {
    **tries_table.SCENARIOS,
    "killed": killed,
    "killed-other-arguments": killed_with_other_arguments,
    "ended-meanwhile": ended_meanwhile,
    "deployed": deployed,
    "ended": ended,
    "ended-again": ended_then(),
    "ended-other-arguments": ended_then(lr=0.01),
}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """With databases on disk, for steps in processes of their own."""
    home = tmp_path_factory.mktemp("dagster-home")
    with dg.DagsterInstance.local_temp(str(home), overrides={"telemetry": {"enabled": False}}) as made:
        yield made


@pytest.fixture
def dagster(tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dagster]:
    place = Place(tmp_path, f"of-{tmp_path.name}-{os.getpid()}")
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("TEST_STORE", place.store)
    monkeypatch.setenv("TEST_ASSETS", str(tmp_path / "assets"))
    monkeypatch.setenv("TEST_RANK_MARK", place.mark)
    # Of the steps' processes, too.
    for folder in (ROOT, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    yield Dagster(place, instance)
    assert wait_until_gone(f"OF_RANK={place.mark}") == []


def test_every_row_has_a_scenario() -> None:
    assert_each_has_a_scenario(SCENARIOS)


SOAK = {
    *tries_table.SOAK,
    # A real `dagster dev` does it at every run of the suite: `test_a_step_that_was_killed_is_retried_...`.
    "killed",
    "deployed",
    # The delivery is that of "unstored-retry"; "ended-other-arguments" ends a run as well.
    "ended-meanwhile",
    "ended-again",
}
"""Rows that run with `make faults` only: each training here begins with a driver that imports torch, some seconds."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.soak] if row.name in SOAK else []) for row in rows()]
)
def test_the_training_does_what_the_table_says(row: Row, dagster: Dagster) -> None:
    SCENARIOS[row.name](dagster)
    dagster.place.assert_outcome(row.outcome, dagster.stored())


def test_without_another_try_the_training_dies_with_its_step(dagster: Dagster) -> None:
    def kill() -> None:
        assert dagster.kill_step()
        assert wait_until_gone(f"OF_RANK={dagster.place.mark}", WAIT) == []

    with dagster.place.beside(kill):
        assert not dagster.execute(once_apart_job)


PATIENT = """
import dagster as dg
from tests.dagster.test_dagster_tries_table import patient_job

with dg.DagsterInstance.local_temp({home!r}, overrides={{"telemetry": {{"enabled": False}}}}) as instance:
    dg.execute_job(dg.reconstructable(patient_job), instance)
"""


def test_a_run_that_is_terminated_while_its_step_waits_for_a_retry_ends_the_training(dagster: Dagster) -> None:
    instance, retries = dagster.instance, dg.DagsterEventType.STEP_UP_FOR_RETRY
    program = PATIENT.format(home=instance.root_directory)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True) as run:
        try:
            assert dagster.kill_step()
            (record,) = instance.get_runs(dg.RunsFilter(job_name="patient_job"))
            until(lambda: instance.all_logs(record.run_id, of_type=retries), WAIT, "a step that waits")
            assert dagster.place.ranks()
            # What the code server does to the process of a run that a user terminates.
            run.send_signal(signal.SIGINT)
            run.wait(WAIT)
        finally:
            run.kill()
    # Without a look at the status, which would follow the run.
    assert wait_until_gone(f"OF_RANK={dagster.place.mark}", WAIT) == []
    until(lambda: dagster.place.run().status().final, WAIT, "the end of the training")
    assert dagster.place.run().status().state == "cancelled"


@pytest.mark.parametrize("job", [once_job, pytest.param(once_apart_job, marks=pytest.mark.soak)])
def test_a_user_trains_anew_although_the_run_that_stored_the_result_was_deleted(
    dagster: Dagster, job: Callable[[], dg.JobDefinition]
) -> None:
    dagster.place.let("end")
    assert dagster.execute(job)
    assert dagster.execute_again(job=job)
    dagster.instance.delete_run(dagster.results[1].run_id)
    assert dagster.execute_again(of=0, job=job)
    assert len(dagster.place.begun()) == 3


def test_a_result_that_was_not_stored_is_delivered_although_its_run_was_deleted(dagster: Dagster) -> None:
    dagster.place.let("end")
    assert dagster.execute()
    dagster.place.let("unstorable")
    assert not dagster.execute_again()
    dagster.instance.delete_run(dagster.results[1].run_id)
    assert dagster.execute_again(of=0)
    assert dagster.stored() == {**dagster.place.begun()[-1]}
    assert len(dagster.place.begun()) == 2
