"""The buttons of a training task."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("spark_ui", ["http://head:4040", None])
def test_a_link_that_has_an_address_has_a_button(
    run_dag: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spark_ui: str | None
) -> None:
    from airflow.sdk import DAG, BaseOperator

    from airflow_rankzero.links import DIRECTORY_KEY, ReportLink, SparkUILink, push_links

    class Linking(BaseOperator):
        operator_extra_links = (SparkUILink(), ReportLink())

        def execute(self, context: Any) -> None:
            push_links(context["ti"], spark_ui=spark_ui, directory="gs://bucket/runs/a b")

    if spark_ui:
        monkeypatch.setenv("AIRFLOW__RANKZERO__STORE", "gs://bucket/runs")
        monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow/team/")
    with DAG(f"links-{bool(spark_ui)}") as dag:
        Linking(task_id="link")
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("link", DIRECTORY_KEY) == "gs://bucket/runs/a b"
    # The web page shows no button for an empty address.
    assert outcome.xcom("link", SparkUILink().xcom_key) == (spark_ui or "")
    report = "https://airflow/team/rankzero/runs/a%20b" if spark_ui else ""
    assert outcome.xcom("link", ReportLink().xcom_key) == report


def test_links_that_cannot_be_pushed_cost_no_training(caplog: pytest.LogCaptureFixture) -> None:
    from airflow_rankzero.links import push_links

    class Broken:
        task = SimpleNamespace()

        def xcom_push(self, key: str, value: str) -> None:
            raise RuntimeError("no database")

    push_links(Broken(), spark_ui="http://head:4040", directory="/runs/a")
    assert "no database" in caplog.text
