"""What only a real worker shows: pickling from its oddly named DAG modules, other DAGs' pulls, an embedded Spark."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.deployment import RUN_TIMEOUT, STOP_TIMEOUT, Deployment, wait_until
from tests.conftest import processes_with

from rankzero import RunHandle


def test_dag_file_function_trains_and_any_dag_pulls_its_result(airflow: Deployment) -> None:
    run_id = airflow.trigger("shipped")
    state = airflow.finish("shipped", run_id)
    log = airflow.log("shipped", run_id, "train")
    assert state == "success", log + airflow.log("shipped", run_id, "diverge")
    # The trap: nobody but the worker could have imported the function's module by its name.
    assert "[1] rank 1 of unusual_prefix_" in log
    # Folded in the UI: where it runs, and what came of it.
    assert "::group::Training run" in log
    assert "format: torch" in log
    # A nan, as a value and as a metric, is more than Airflow's XCom can hold.
    assert "ResultRef" in str(airflow.xcom("shipped", run_id, "diverge"))
    # The button of a task leads to Airflow's own pages.
    assert airflow.xcom("shipped", run_id, "train", "rankzero_report_url").startswith(f"{airflow.url}/rankzero/runs/")
    pulled = airflow.trigger("pulling", run_id=run_id)
    assert airflow.finish("pulling", pulled) == "success", airflow.log("pulling", pulled, "pull")
    assert airflow.xcom("pulling", pulled, "pull") == "85 nan"


def test_a_deferred_task_shows_its_secrets_nowhere(airflow: Deployment, tmp_path: Path) -> None:
    """The triggerer, another process than that of the task, shows the line that has one."""
    token = secrets.token_hex(8)
    run_id = airflow.trigger("secretive", folder=str(tmp_path), token=token)
    task = ("secretive", run_id, "train")
    wait_until(lambda: airflow.look(*task)["state"] == "deferred", RUN_TIMEOUT, "the deferral")
    (tmp_path / "go").touch()
    assert airflow.finish("secretive", run_id) == "success", airflow.log(*task)
    log = airflow.log(*task)
    # A deferral is no failure.
    assert '"warning"' not in log
    assert "[0] the token is ***" in log
    assert token not in log
    fields = airflow.look(*task)["rendered_fields"]
    assert fields["env"] == {"HF_TOKEN": "***"}
    assert token not in str(fields)


def test_errors_of_ranks_are_named_as_in_the_dag_file_and_a_look_up_is_one(airflow: Deployment) -> None:
    """Deployed, the module of a DAG file has another name, and a worker has no database."""
    run_id = airflow.trigger("failing")
    assert airflow.finish("failing", run_id) == "failed"
    own, look_up = (airflow.log("failing", run_id, name) for name in ("own", "look_up"))
    assert "failed: training_dags.OfThisFileError: no rows" in own
    assert "failed: airflow_rankzero.provider_info.LookupInRankError: the variable" in look_up


@pytest.fixture
def endless(airflow: Deployment) -> Iterator[tuple[str, str, RunHandle[Any]]]:
    """A training that never ends and ignores SIGTERM: DAG run id, its ranks' marker, its run."""
    marker = f"endless-{secrets.token_hex(8)}"
    run_id = airflow.trigger("endless", mark=marker)
    run = airflow.run_of("endless", run_id)
    wait_until(lambda: run.status().state == "running", RUN_TIMEOUT, "the training")
    assert len(processes_with(marker)) >= 2
    wait_until(lambda: "[1] never ends" in airflow.log("endless", run_id, "train"), RUN_TIMEOUT, "live log lines")
    yield run_id, marker, run
    assert processes_with(marker) == []


def test_marking_a_task_failed_ends_its_ranks(airflow: Deployment, endless: tuple[str, str, RunHandle[Any]]) -> None:
    run_id, marker, run = endless
    airflow.mark("endless", run_id, "train", "failed")
    # Airflow tells the task with its next heartbeat.
    wait_until(lambda: run.status().final, RUN_TIMEOUT, "the end of the run")
    assert run.status().state == "cancelled"
    # By the task, and not by the lease of a run that has lost it.
    assert "on request: Airflow has set the task to failed" in str(run.status().error)
    wait_until(lambda: not processes_with(marker), STOP_TIMEOUT, "the end of the ranks")
