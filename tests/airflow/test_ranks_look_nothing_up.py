"""A rank that asks Airflow for a variable or a connection fails with one typed error, in `dag.test()` as deployed."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.airflow.versions import RunDag


def of_variable() -> Any:
    from airflow.sdk import Variable

    return Variable.get("x", default="d")


def of_connection() -> Any:
    from airflow.sdk import BaseHook

    return BaseHook.get_connection("here").conn_type


def of_old_names() -> Any:
    from airflow.models import Variable

    return Variable.get("x", default_var="d")


@pytest.mark.parametrize(
    ("look_up", "template"),
    # An `ObjectStoragePath` with a connection asks for it like its hooks.
    [(of_variable, "var.value.x"), (of_connection, "conn.here.password"), (of_old_names, "var.value.x")],
)
def test_a_look_up_in_a_rank_is_one_typed_error(
    dag: Any, run_dag: RunDag, look_up: Callable[[], Any], template: str, operator: Any
) -> None:
    operator(look_up)
    error = run_dag(dag).errors["train"]
    assert error.exception_type == "airflow_rankzero.secrets.LookupInRankError"
    assert "was looked up in a rank" in str(error)
    assert f'"{{{{ {template} }}}}"' in str(error)


def seen() -> list[Any]:
    from airflow.sdk import ObjectStoragePath

    values = [value for name, value in os.environ.items() if name.endswith("SQL_ALCHEMY_CONN")]
    return [sorted(set(values)), ObjectStoragePath("file:///tmp").exists(), os.environ["OWN"]]


def test_a_rank_has_no_database_of_airflow_and_what_needs_none_works(dag: Any, run_dag: RunDag, operator: Any) -> None:
    operator(seen, env={"OWN": "1"})
    outcome = run_dag(dag)
    assert outcome.xcom("train") == [["ranks-have-no-database-of-airflow://"], True, "1"], outcome.errors
