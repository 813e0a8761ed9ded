"""The buttons of a training task."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def linking_operator(**addresses: str | None) -> Any:
    from airflow.sdk import BaseOperator

    from airflow_rankzero.links import ReportLink, RunDirectoryLink, SparkUILink, push_links

    class Linking(BaseOperator):
        operator_extra_links = (SparkUILink(), RunDirectoryLink(), ReportLink())

        def execute(self, context: Any) -> None:
            push_links(context["ti"], **addresses)

    return Linking(task_id="link")


def test_links_are_there_while_and_after_the_task_runs(run_dag: Callable[..., Any]) -> None:
    from airflow.sdk import DAG

    from airflow_rankzero.links import DIRECTORY_KEY, ReportLink, RunDirectoryLink, SparkUILink

    with DAG("links") as dag:
        linking_operator(spark_ui="http://head:4040", directory="gs://bucket/runs/a b")
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    assert outcome.xcom("link", SparkUILink().xcom_key) == "http://head:4040"
    assert outcome.xcom("link", DIRECTORY_KEY) == "gs://bucket/runs/a b"
    address = "https://console.cloud.google.com/storage/browser/bucket/runs/a%20b"
    assert outcome.xcom("link", RunDirectoryLink().xcom_key) == address
    report = "https://console.cloud.google.com/storage/browser/_details/bucket/runs/a%20b/report.html"
    assert outcome.xcom("link", ReportLink().xcom_key) == report


def test_a_link_without_an_address_has_no_button(run_dag: Callable[..., Any], tmp_path: Path) -> None:
    from airflow.sdk import DAG

    from airflow_rankzero.links import RunDirectoryLink, SparkUILink

    with DAG("no-links") as dag:
        linking_operator(directory=str(tmp_path))
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    # The web page shows no button for either.
    assert not outcome.xcom("link", SparkUILink().xcom_key)
    assert not outcome.xcom("link", RunDirectoryLink().xcom_key)


def test_links_that_cannot_be_pushed_cost_no_training(caplog: pytest.LogCaptureFixture) -> None:
    from airflow_rankzero.links import push_links

    class Broken:
        task = SimpleNamespace()

        def xcom_push(self, key: str, value: str) -> None:
            raise RuntimeError("no database")

    push_links(Broken(), spark_ui="http://head:4040", directory="/runs/a")
    assert "no database" in caplog.text


def test_a_web_page_shows_the_store_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero.links import web_address

    assert web_address("s3://bucket/runs/a") == "https://s3.console.aws.amazon.com/s3/buckets/bucket?prefix=runs/a/"
    # Airflow's page shows no button for these.
    assert web_address("/data/runs/a") is None
    assert web_address("abfs://container@account/runs/a") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert web_address("s3://bucket/runs/a") is None
    monkeypatch.setenv("AIRFLOW__RANKZERO__DIRECTORY_URL", "https://files.example.com/{path}?run={name}")
    assert web_address("s3://bucket/runs/a") == "https://files.example.com/bucket/runs/a?run=a"
    assert web_address("/data/runs/a") == "https://files.example.com//data/runs/a?run=a"


@pytest.mark.parametrize("template", ["https://files/{bucket}", "https://files/{path.bucket}", "https://files/{"])
def test_a_template_with_other_placeholders_is_named(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    from airflow_rankzero.links import web_address
    from rankzero import InvalidJobError

    monkeypatch.setenv("AIRFLOW__RANKZERO__DIRECTORY_URL", template)
    with pytest.raises(InvalidJobError, match="only {path} and {name} can stand in it"):
        web_address("/runs/a")
