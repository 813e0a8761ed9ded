"""OpenLineage, with its provider and without."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

COMPAT = "airflow.providers.common.compat.openlineage.utils.spark"
PARENT = {"spark.openlineage.parentRunId": "42"}


def provider_is_here() -> bool:
    try:
        return importlib.util.find_spec("airflow.providers.openlineage") is not None
    except ModuleNotFoundError:
        return False


with_provider = pytest.mark.skipif(
    not provider_is_here(), reason="apache-airflow-providers-openlineage is not installed"
)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage", None)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A provider of which only the injection is used."""
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage", ModuleType("airflow.providers.openlineage"))
    compat = ModuleType(COMPAT)
    monkeypatch.setattr(
        compat,
        "inject_parent_job_information_into_spark_properties",
        lambda properties, context: {**properties, **PARENT},
        raising=False,
    )
    monkeypatch.setitem(sys.modules, COMPAT, compat)
    return compat


def switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__SPARK_INJECT_PARENT_JOB_INFO", "True")


def test_without_the_provider_nothing_changes(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero.openlineage.lineage import RunFacts, facets, spark_properties

    switch_on(monkeypatch)
    assert spark_properties({"a": "b"}, {}) == {"a": "b"}  # type: ignore[typeddict-item]
    assert facets(RunFacts(2, "/runs/a", "/runs/a/result/value.json")) is None


def test_nothing_is_injected_unless_asked_for(present: ModuleType) -> None:
    from airflow_rankzero.openlineage.lineage import spark_properties

    given = {"a": "b"}
    found = spark_properties(given, {})  # type: ignore[typeddict-item]
    assert found == given
    assert found is not given


def test_parent_job_is_injected_when_asked_for(present: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero.openlineage.lineage import spark_properties

    switch_on(monkeypatch)
    assert spark_properties({"a": "b"}, {}) == {"a": "b", **PARENT}  # type: ignore[typeddict-item]


def test_trouble_with_lineage_stops_no_task(
    present: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow_rankzero.openlineage.lineage import RunFacts, facets, spark_properties

    def fail(properties: Any, context: Any) -> Any:
        raise RuntimeError("no run id")

    switch_on(monkeypatch)
    monkeypatch.setattr(present, "inject_parent_job_information_into_spark_properties", fail)
    assert spark_properties({"a": "b"}, {}) == {"a": "b"}  # type: ignore[typeddict-item]
    assert "no OpenLineage information" in caplog.text
    # The fake provider has no OperatorLineage.
    assert facets(RunFacts(2)) is None


@with_provider
def test_facets_describe_the_run() -> None:
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.serde import Serde

    from airflow_rankzero.openlineage.lineage import RunFacts, facets
    from rankzero import WorkerFailedError

    found = facets(
        RunFacts(
            4,
            "s3://bucket/runs/a",
            result="s3a://bucket/runs/a/result/value.json",
            inputs=["/data/b/result/value.json"],
            error=WorkerFailedError("rank 1 failed", rank=1, traceback="Traceback of rank 1"),
        )
    )
    assert found.outputs == [Dataset("s3://bucket", "runs/a/result/value.json")]
    assert found.inputs == [Dataset("file", "/data/b/result/value.json")]
    run = Serde.to_dict(found.run_facets["rankzero_run"])
    assert (run["worldSize"], run["runDirectory"]) == (4, "s3://bucket/runs/a")
    assert run["firstCause"] == "Traceback of rank 1"


@with_provider
def test_what_is_not_known_yet_is_left_out() -> None:
    from airflow_rankzero.openlineage.lineage import RunFacts, facets

    found = facets(RunFacts(4))
    assert found.inputs == []
    assert found.outputs == []
    assert set(found.run_facets) == {"rankzero_run"}


@with_provider
def test_airflow_collects_the_facets_of_the_operator() -> None:
    from airflow.providers.openlineage.extractors.base import DefaultExtractor

    from airflow_rankzero.openlineage.lineage import RunFacts, facets

    class Operator:
        task_type = "Operator"

        def get_openlineage_facets_on_start(self) -> Any:
            return facets(RunFacts(2))

        def get_openlineage_facets_on_complete(self, ti: Any) -> Any:
            return facets(RunFacts(2, "/runs/a", "/runs/a/result/value.json"))

    extractor = DefaultExtractor(Operator())
    assert set(extractor.extract().run_facets) == {"rankzero_run"}
    done = extractor.extract_on_complete(SimpleNamespace())
    assert [each.name for each in done.outputs] == ["/runs/a/result/value.json"]


@with_provider
def test_spark_learns_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    from airflow_rankzero.openlineage.lineage import spark_properties

    switch_on(monkeypatch)
    run = SimpleNamespace(logical_date=datetime(2026, 1, 1, tzinfo=UTC), conf={}, clear_number=0)
    ti = SimpleNamespace(
        dag_id="digits", task_id="train", try_number=1, map_index=-1, dag_run=run, get_template_context=dict
    )
    found = spark_properties({"a": "b"}, {"ti": ti})  # type: ignore[typeddict-item]
    assert found["a"] == "b"
    assert found["spark.openlineage.parentJobName"] == "digits.train"
    assert found["spark.openlineage.rootParentJobName"] == "digits"
