"""The operator takes what `rankzero.Launcher` takes, with its defaults; what differs is listed, with the reason."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.airflow.versions import RunDag

OF_THE_LAUNCHER_ALONE = {
    "engine": "the operator has conn_id, master and spark_conf",
    "run_id": "made of DAG, run, task and map index: every try finds the same run",
    "labels": "the operator's own notes",
}
OF_THE_OPERATOR_ALONE = {
    "train": "an argument of Launcher.run",
    "op_args": "an argument of Launcher.run",
    "op_kwargs": "an argument of Launcher.run",
    "conn_id": "the engine",
    "master": "the engine",
    "spark_conf": "the engine",
    "deferrable": "Airflow's own",
    "retry_user_errors": "of a pipeline, as Dagster's resource has it",
    "skip_on_exit_code": "the state of the task, as Airflow's own operators have it",
    "log_ranks": "of whoever follows, as Dagster's resource has it",
}
OTHER_DEFAULTS = {
    "num_processes": "a task of one rank needs no operator for distributed training",
    "use_gpu": "None: what the connection says, else the launcher's default",
    "processes_per_task": "None: what the connection says, else the launcher's default",
    "checkpoints": "None: the launcher's default, which is an object",
}


def parameters() -> dict[str, inspect.Parameter]:
    from airflow_rankzero import TorchDistributorOperator

    found = inspect.signature(TorchDistributorOperator.__init__).parameters
    return {name: each for name, each in found.items() if each.kind is each.KEYWORD_ONLY}


def test_the_operator_takes_what_the_launcher_takes() -> None:
    from rankzero import Launcher

    launcher = {field.name: field for field in dataclasses.fields(Launcher) if field.name != "_"}
    operator = parameters()
    assert set(launcher) - set(operator) == set(OF_THE_LAUNCHER_ALONE)
    assert set(operator) - set(launcher) == set(OF_THE_OPERATOR_ALONE)
    shared = set(launcher) & set(operator)
    assert {name for name in shared if operator[name].default != launcher[name].default} == set(OTHER_DEFAULTS)


def test_a_master_is_a_template_and_refused_with_its_name(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    """Before a JVM starts: a wrong one, and one without enough slots."""
    from airflow_rankzero import TorchDistributorOperator
    from airflow_rankzero._compat import AirflowFailException
    from rankzero import InsufficientSlotsError

    common: dict[str, Any] = {"train": print, "store": str(tmp_path)}
    TorchDistributorOperator(task_id="small", master="local[{{ params.ranks - 1 }}]", **common)
    TorchDistributorOperator(task_id="wrong", master="head:7077", **common)
    errors = run_dag(dag).errors
    assert isinstance(errors["small"], InsufficientSlotsError)
    assert "local[1]" in str(errors["small"])
    assert isinstance(errors["wrong"], AirflowFailException)
    assert "master is 'head:7077'" in str(errors["wrong"])


def describe(*found: Any) -> list[Any]:
    return [list(found), sorted({type(item).__name__ for item in found})]


def test_combined_results_of_other_tasks_are_lists_in_the_ranks(dag: Any, run_dag: RunDag, operator: Any) -> None:
    from airflow.sdk import ObjectStoragePath, task

    @task
    def ones() -> list[int]:
        return [1, 2]

    @task
    def place() -> ObjectStoragePath:
        return ObjectStoragePath("file:///data/rows")

    first, mapped = ones(), task(task_id="each")(lambda x: 10 * x).expand(x=[1, 2])
    given = [first.map(lambda x: x + 1), first.zip(mapped), first.concat(mapped), mapped, place()]
    operator(describe, op_args=given)
    outcome = run_dag(dag)
    found = [[2, 3], [(1, 10), (2, 20)], [1, 2, 10, 20], [10, 20], "/data/rows"]
    pushed = outcome.xcom("train")
    # A tuple is no JSON value.
    assert pushed.load() == [found, ["list", "str"]], outcome.errors


def test_other_objects_of_airflow_are_refused_by_name_before_the_submission() -> None:
    import jinja2
    from airflow.sdk import Asset

    from airflow_rankzero.xcom import keyword, positional
    from rankzero import InvalidJobError

    with pytest.raises(InvalidJobError, match=r"op_kwargs\['model'\]\[0\] is a Asset of Airflow"):
        keyword({"model": [Asset("model")]})
    undefined = jinja2.StrictUndefined(name="rate")
    with pytest.raises(InvalidJobError, match=r"op_args\[1\] is a template .* 'rate' is undefined"):
        positional([1, undefined])


def test_default_arguments_of_a_dag_reach_the_options() -> None:
    from airflow.sdk import DAG

    from airflow_rankzero import TorchDistributorOperator, torch_distributor

    unset = {"deferrable": None, "retry_user_errors": None}
    with DAG("defaults", default_args={"num_processes": 7, "stop_grace": 3.0, "owner": "team", **unset}):
        operator = TorchDistributorOperator(task_id="train", train=print, stop_grace=4.0)
        decorated = torch_distributor(print)().operator
    assert (operator.num_processes, operator.stop_grace, operator.owner) == (7, 4.0, "team")
    assert (decorated.num_processes, decorated.stop_grace) == (7, 3.0)
    assert operator.deferrable is operator.retry_user_errors is False
    with pytest.raises(TypeError, match="num_proceses"):
        TorchDistributorOperator(task_id="wrong", train=print, num_proceses=2)


def test_a_mapped_group_s_output_is_a_list_by_map_index(
    dag: Any, run_dag: RunDag, caplog: pytest.LogCaptureFixture, operator: Any
) -> None:
    """Airflow gives a text for one instance, None for none, and leaves skipped instances out."""
    from airflow.sdk import task, task_group

    @task
    def part(day: str) -> str:
        if day == "b":
            raise versions.exception("AirflowSkipException")
        return f"/rows/{day}"

    @task_group
    def of_day(day: str) -> Any:
        return part(day)

    groups = [of_day.override(group_id=f"g{len(days)}").expand(day=days) for days in (["a", "b", "c"], ["a"], [])]
    several, one, none = groups
    given = {"several": several, "one": one, "none": none, "deep": {"in": [one]}, "upper": one.map(str.upper)}
    operator(dict, op_kwargs=given, trigger_rule="all_done")
    outcome = run_dag(dag)
    assert outcome.xcom("train") == {
        "several": ["/rows/a", None, "/rows/c"],
        "one": ["/rows/a"],
        "none": [],
        "deep": {"in": [["/rows/a"]]},
        "upper": ["/ROWS/A"],
    }, outcome.errors
    assert caplog.text.count("g3.part has no value of map index 1: None stands for each") == 1


def test_inside_of_a_mapped_group_a_training_gets_the_value_of_its_instance(
    dag: Any, run_dag: RunDag, tmp_path: Path
) -> None:
    from airflow.sdk import task, task_group

    from airflow_rankzero import torch_distributor

    @task
    def part(day: str) -> str:
        return f"/rows/{day}"

    @task_group
    def of_day(day: str) -> None:
        torch_distributor(task_id="train", num_processes=1, conn_id="here", store=str(tmp_path))(repr)(part(day))

    of_day.expand(day=["a", "b"])
    outcome = run_dag(dag)
    assert outcome.mapped_xcoms("of_day.train") == ["'/rows/a'", "'/rows/b'"], outcome.errors


def with_context(lr: float, ds: str | None = None, **context: Any) -> list[Any]:
    return [lr, ds, context]


def test_a_parameter_named_like_a_context_variable_is_passed_or_refused(dag: Any) -> None:
    from airflow_rankzero import TorchDistributorOperator, torch_distributor
    from rankzero import InvalidJobError

    def of_ti(lr: float, *, ti: Any) -> float:
        return lr

    def of_generic(lr: float, **kwargs: Any) -> float:
        return lr

    made = torch_distributor(num_processes=1)(with_context)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("ds", lambda: made(0.1)),
        (r"\*\*context", lambda: made(0.1, ds="{{ ds }}")),
        ("ds", lambda: TorchDistributorOperator(task_id="a", train=with_context, op_args=[0.1])),
        ("ti", lambda: torch_distributor(of_ti)(0.1)),
    ]
    for name, make in refused:
        with pytest.raises(InvalidJobError, match=f"the parameter {name} is named like .* context.* pass the value"):
            make()
    torch_distributor(of_generic)(0.1)
    made(0.1, ds="{{ ds }}", run="{{ run_id }}")
