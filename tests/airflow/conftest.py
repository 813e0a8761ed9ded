"""A private Airflow for this directory: home, database and DAG folder of its own.

Airflow reads these variables when it is imported, so they are set here, before any test is. The
other rooms' tests never import it.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.database import migrate
from tests.conftest import restore_signal_handlers, signal_handlers

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
    migrate(os.environ)
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


def register(dag: Any) -> None:
    """Airflow runs only DAGs that it knows in serialized form."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager

    DagBundlesManager().sync_bundles_to_db()
    versions.write(dag)
