"""A private Airflow for this directory: home, database and DAG folder of its own.

Airflow reads these variables when it is imported, so they are set here, before any test is. The
other rooms' tests never import it.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.conftest import find, until
from tests.handlers import restore_signal_handlers, signal_handlers

from rankzero import Launcher

# Deleted when the object is, at the end of the test process.
_home = tempfile.TemporaryDirectory(prefix="rankzero-airflow-", ignore_cleanup_errors=True)
HOME = _home.name
# Empty: each `dag.test` parses every file of the folder and writes every DAG of it to the database.
DAGS_FOLDER = os.path.join(HOME, "dags")
os.mkdir(DAGS_FOLDER)
os.environ.update(
    {
        "AIRFLOW_HOME": HOME,
        "AIRFLOW__CORE__DAGS_FOLDER": DAGS_FOLDER,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        # Ranks on this machine, without a JVM.
        "AIRFLOW_CONN_HERE": '{"conn_type": "rankzero", "extra": {"engine": "local"}}',
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
    }
)


@pytest.fixture(autouse=True, scope="session")
def airflows_logging() -> None:
    """Airflow takes the handlers of the root logger when it is imported: `caplog` adds its own after that."""
    import airflow  # noqa: F401


@pytest.fixture(autouse=True)
def airflows_signal_handlers(same_signal_handlers: None) -> Iterator[None]:
    """A task that Airflow runs in this process (`dag.test`) leaves its handler of SIGTERM."""
    before = signal_handlers()
    yield
    restore_signal_handlers({**signal_handlers(), "SIGTERM": before["SIGTERM"]})


@pytest.fixture(scope="session")
def airflow_home() -> Path:
    """An initialized metadata database."""
    from airflow.utils.db import upgradedb

    # As ``airflow db migrate``, whose process would import Airflow once more.
    upgradedb()
    return Path(HOME)


@pytest.fixture
def dag(request: pytest.FixtureRequest) -> Any:
    """An empty DAG, named after the test; what is made in the test belongs to it."""
    from airflow.sdk import DAG

    with DAG(re.sub(r"\W+", "-", request.node.name), params={"lr": 0.25, "ranks": 2}) as made:
        yield made


class DagOutcome:
    """What a DAG run left: states, errors and XComs of its tasks."""

    def __init__(self, dag_run: Any, errors: dict[str, BaseException]) -> None:
        self._dag_run = dag_run
        self.errors = errors

    @property
    def run_id(self) -> str:
        return str(self._dag_run.run_id)

    @property
    def state(self) -> str:
        return str(self._dag_run.state)

    def task_state(self, task_id: str) -> str:
        return str(self._dag_run.get_task_instance(task_id).state)

    def xcom(self, task_id: str, key: str = "return_value") -> Any:
        encoded = self._dag_run.get_task_instance(task_id).xcom_pull(task_ids=task_id, key=key)
        return versions.deserialize(encoded)

    def mapped_xcoms(self, task_id: str) -> list[Any]:
        tis = sorted(
            (ti for ti in self._dag_run.get_task_instances() if ti.task_id == task_id), key=lambda ti: ti.map_index
        )
        return [ti.xcom_pull(task_ids=task_id, map_indexes=ti.map_index) for ti in tis]


@pytest.fixture
def run_dag(airflow_home: Path) -> Callable[..., DagOutcome]:
    """Runs every task of a DAG in this process, through Airflow's task runner and its database."""

    def run(dag: Any, **kwargs: Any) -> DagOutcome:
        register(dag)
        versions.give_callbacks_the_exception()
        errors: dict[str, BaseException] = {}

        def remember(context: Any) -> None:
            ti = context["ti"]
            errors[ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]"] = context["exception"]

        for task in dag.tasks:
            if task.is_mapped:
                task.partial_kwargs["on_failure_callback"] = [remember]
            else:
                task.on_failure_callback = [remember]
        return DagOutcome(dag.test(**kwargs), errors)

    return run


@pytest.fixture
def operator(tmp_path: Path) -> Callable[..., Any]:
    """Makes a task ``train`` of one rank on this machine, with its run directory in the folder of the test."""

    def make(train: Any, **arguments: Any) -> Any:
        from airflow_rankzero import TorchDistributorOperator

        given = {"task_id": "train", "num_processes": 1, "conn_id": "here", "store": str(tmp_path), **arguments}
        return TorchDistributorOperator(train=train, **given)

    return make


def register(dag: Any) -> None:
    """Airflow runs only DAGs that it knows in serialized form."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager

    DagBundlesManager().sync_bundles_to_db()
    versions.write(dag)


class Watched:
    """A task instance without a process, whose training runs, and what the scheduler's thread does about it."""

    def __init__(self, dag_id: str, run_id: str, launcher: Launcher) -> None:
        from airflow_rankzero import listeners

        self._listeners, self.watch = listeners, listeners.Watch(grace=0.0)
        self.dag_id, self.run_id = dag_id, run_id
        self.set_state("up_for_retry")
        self.launcher = launcher
        self.handle = launcher.submit(time.sleep, 120)
        until(lambda: self.handle.status().state == "running", 60, "the training")
        self.watch.poll()

    def set_state(self, state: str | None) -> None:
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session
        from sqlalchemy import update

        with create_session(scoped=False) as session:
            session.execute(update(TaskInstance).where(TaskInstance.run_id == self.run_id).values(state=state))

    def delete_run(self) -> None:
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from sqlalchemy import delete

        with create_session(scoped=False) as session:
            session.execute(delete(DagRun).where(DagRun.run_id == self.run_id))

    def delete_dag(self) -> None:
        """What the web page, the REST API and the command do."""
        from airflow.api.common.delete_dag import delete_dag

        delete_dag(self.dag_id)

    def poll(self) -> None:
        """Polls once, and ends what is due, as the threads of the scheduler do."""
        for row in self.watch.poll():
            self._listeners.end(row)


@pytest.fixture
def watched(dag: Any, run_dag: Callable[..., DagOutcome], tmp_path: Path) -> Iterator[Watched]:
    from airflow.sdk import task

    @task(task_id="train")
    def note(**context: Any) -> None:
        context["ti"].xcom_push(key="run_directory", value=str(tmp_path / "left"))

    note()
    run_id = run_dag(dag).run_id
    labels = {"dag_id": dag.dag_id, "dag_run_id": run_id, "task_id": "train", "map_index": "-1"}
    made = Watched(dag.dag_id, run_id, Launcher(1, store=tmp_path, run_id="left", labels=labels))
    yield made
    find(made.launcher).cancel()
    assert find(made.launcher).wait(60)
