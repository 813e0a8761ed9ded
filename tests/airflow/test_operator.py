"""The operator and the decorator, run by Airflow's own task runner on an embedded Spark."""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag
from tests.conftest import until

from rankzero import Launcher


def make_weights(scale: float) -> dict:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return {"weights": total}


def describe(given: dict, *, word: str, lr: str) -> dict:
    import os

    import torch

    assert isinstance(given["nested"][0]["weights"], torch.Tensor)
    print(f"rank {os.environ['RANK']} says {word}")
    return {"sum": float(given["nested"][0]["weights"].sum()), "word": word, "lr": lr, "mark": os.environ["MARK"]}


def test_values_travel_by_themselves_or_by_reference(
    dag: Any, run_dag: RunDag, tmp_path: Path, capfd: pytest.CaptureFixture[str], operator: Any
) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator
    from rankzero import ResultRef

    # One JVM is enough: the next step's.
    train = operator(make_weights, num_processes=2, op_args=[2.0])
    report = TorchDistributorOperator(
        task_id="report",
        train=describe,
        op_args=[{"nested": [train.output]}],
        op_kwargs={"word": "{{ task.task_id }}", "lr": "{{ params.lr }}"},
        env={"MARK": "of {{ dag.dag_id }}"},
        store=str(tmp_path),
        spark_conf={"spark.app.name": "{{ task.task_id }}"},
    )

    @task
    def load(ref: ResultRef) -> float:
        return float(ref.load()["weights"].sum())

    load(train.output) >> report
    first = run_dag(dag)
    assert first.state == "success", first.errors
    ref = first.xcom("train")
    assert isinstance(ref, ResultRef)
    assert ref.format == "torch"
    assert first.xcom("load") == 18.0
    assert first.xcom("report") == {"sum": 18.0, "word": "report", "lr": "0.25", "mark": f"of {dag.dag_id}"}
    log = capfd.readouterr().out
    assert "[0] rank 0 says report" in log
    assert "[1] rank 1 says report" in log
    runs = sorted(path.name for path in tmp_path.iterdir())
    assert [name[: name.rindex("-")] for name in runs] == [
        f"{dag.dag_id}__{first.run_id}__{name}".replace(":", "-") for name in ("report", "train")
    ]


@pytest.mark.parametrize("codes", [pytest.param(99, marks=pytest.mark.soak), (98, 99)])
def test_a_training_skips_its_task_by_an_exit_code(dag: Any, run_dag: RunDag, tmp_path: Path, codes: Any) -> None:
    from airflow.sdk import task

    from airflow_rankzero import torch_distributor

    @torch_distributor(num_processes=1, conn_id="here", store=str(tmp_path), skip_on_exit_code=codes)
    def train(code: int) -> int:
        sys.exit(code)

    @task
    def deploy(model: Any) -> None:
        pass

    deploy(train.override(task_id="nothing")(99))
    train.override(task_id="broken")(97)
    outcome = run_dag(dag)
    assert [outcome.task_state(name) for name in ("nothing", "deploy", "broken")] == ["skipped", "skipped", "failed"]


def test_mapped_decorated_function_runs_on_the_connection(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow.sdk import task

    # The annotation alone would make Airflow expect a dict, not a reference.
    @task.torch_distributor(num_processes=1, conn_id="here", store=str(tmp_path))
    def train(lr: float, steps: str) -> dict[str, Any]:
        import torch

        return {"tensor": torch.ones(2) * lr, "steps": steps}

    @task
    def collect(refs: list[Any]) -> list[Any]:
        loaded = [ref.load() for ref in refs]
        return [[each["tensor"].tolist(), each["steps"]] for each in loaded]

    collect(train.partial(steps="{{ params.lr }}").expand(lr=[0.5, 1.5]))
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("collect") == [[[0.5, 0.5], "0.25"], [[1.5, 1.5], "0.25"]]
    jobs = {path.parents[1].name: json.loads(path.read_text()) for path in tmp_path.glob("*/submissions/0.json")}
    # Without one they would be Spark's.
    assert {job["engine"]["kind"] for job in jobs.values()} == {"local"}
    assert sorted(name.split("__")[-1].partition("-")[0] for name in jobs) == ["0", "1"]


def test_execution_timeout_ends_the_run(dag: Any, run_dag: RunDag, tmp_path: Path, operator: Any) -> None:
    from datetime import timedelta

    from rankzero import RunHandle

    def train() -> None:
        import threading

        threading.Event().wait()

    def is_running() -> bool:
        return any(
            RunHandle.attach(job.parents[1]).status().state == "running"
            for job in tmp_path.glob("*/submissions/0.json")
        )

    def let_time_pass() -> None:
        until(is_running, 120, "the training")
        # As the timer of Airflow's timeout does.
        os.kill(os.getpid(), signal.SIGALRM)

    operator(train, execution_timeout=timedelta(minutes=4))
    threading.Thread(target=let_time_pass, daemon=True).start()
    outcome = run_dag(dag)
    assert isinstance(outcome.errors["train"], versions.exception("AirflowTaskTimeout"))
    (directory,) = tmp_path.iterdir()
    status = RunHandle.attach(directory).status()
    assert status.state == "cancelled"
    assert "AirflowTaskTimeout" in str(status.error)


def test_a_deferred_task_delivers_no_other_run_of_its_name(
    dag: Any, run_dag: RunDag, tmp_path: Path, operator: Any
) -> None:
    calls: list[int] = []

    def replace_after_deferral(context: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            (directory,) = tmp_path.iterdir()
            shutil.rmtree(directory)
            Launcher(1, store=tmp_path, run_id=directory.name).submit(lambda: 8).wait(120)

    operator(lambda: 7, deferrable=True, pre_execute=replace_after_deferral)
    outcome = run_dag(dag)
    assert outcome.xcom("train") == 7, outcome.errors
    assert len(calls) == 3


def test_a_directory_that_is_not_ours_is_refused_before_it_is_read(
    dag: Any, run_dag: RunDag, tmp_path: Path, operator: Any
) -> None:
    from airflow_rankzero.tries import run_id_of

    def plant(context: Any) -> None:
        planted = tmp_path / run_id_of(dag.dag_id, context["ti"].run_id, "train", -1)
        (planted / "submissions" / "0.json").mkdir(parents=True)
        planted.chmod(0o777)

    operator(lambda: 7, pre_execute=plant)
    assert "can be written by every user" in str(run_dag(dag).errors["train"])


@pytest.mark.parametrize("deploy_mode", ["client", "cluster"])
def test_a_task_whose_container_would_end_with_its_driver_does_not_defer(
    dag: Any,
    run_dag: RunDag,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    operator: Any,
    deploy_mode: str,
) -> None:
    # Refused after the operator has decided whether to defer, and before anything is submitted.
    extra = {"deploy_mode": deploy_mode, "conf": {"spark.dynamicAllocation.enabled": "true"}}
    place = {"conn_type": "rankzero", "host": "spark://head", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_PLACE", json.dumps(place))

    def enter_container(context: Any) -> None:
        monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")

    # Not before: Airflow's API server, which is in this process, reads it as well.
    operator(lambda: 7, conn_id="place", deferrable=True, pre_execute=enter_container)
    assert run_dag(dag).state == "failed"
    log = capfd.readouterr().out
    assert "SPARK-24942" in log
    assert ("not deferred, although deferrable=True" in log) is (deploy_mode == "client")


def test_an_operator_may_be_copied_and_listed(dag: Any) -> None:
    import copy

    from airflow.serialization.serialized_objects import LazyDeserializedDAG

    from airflow_rankzero import TorchDistributorOperator

    lock = threading.Lock()

    def train() -> bool:
        return lock.locked()

    operator = TorchDistributorOperator(task_id="train", train=train, deferrable=True)
    assert copy.deepcopy(operator).train is train
    assert copy.deepcopy(dag).task_dict["train"].train is train
    assert json.dumps(LazyDeserializedDAG.from_dag(dag).data)


def test_what_may_be_there_at_the_next_try_is_left_to_it(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    """A secrets backend that does not answer says the same as one without the connection; a store may be full."""
    from airflow_rankzero import TorchDistributorOperator
    from airflow_rankzero._compat import AirflowFailException
    from rankzero import InvalidJobError

    (tmp_path / "file").touch()
    TorchDistributorOperator(task_id="nowhere", train=print, store=str(tmp_path), conn_id="nowhere")
    TorchDistributorOperator(task_id="full", train=print, store=str(tmp_path / "file"), conn_id="here")
    errors = run_dag(dag).errors
    for task_id, words in (("nowhere", "conn_id='nowhere'"), ("full", "the store cannot be used")):
        assert isinstance(errors[task_id], InvalidJobError), errors
        assert not isinstance(errors[task_id], AirflowFailException)
        assert words in str(errors[task_id])
