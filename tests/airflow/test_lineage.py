"""OpenLineage, with its provider and without."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

COMPAT = "airflow.providers.common.compat.openlineage.utils.spark"
PARENT = {"spark.openlineage.parentRunId": "42"}


def provider_is_here() -> bool:
    """Whether the provider is installed, without the import of Airflow that a search for its module needs."""
    return any(importlib.metadata.distributions(name="apache-airflow-providers-openlineage"))


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
    from airflow_rankzero import RunFacts, facets, spark_properties

    switch_on(monkeypatch)
    assert spark_properties({"a": "b"}, {}) == {"a": "b"}  # type: ignore[typeddict-item]
    assert facets(RunFacts(2, "/runs/a", "/runs/a/result/value.json")) is None


def test_nothing_is_injected_unless_asked_for(present: ModuleType) -> None:
    from airflow_rankzero import spark_properties

    given = {"a": "b"}
    found = spark_properties(given, {})  # type: ignore[typeddict-item]
    assert found == given
    assert found is not given


def test_parent_job_is_injected_when_asked_for(present: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero import spark_properties

    switch_on(monkeypatch)
    assert spark_properties({"a": "b"}, {}) == {"a": "b", **PARENT}  # type: ignore[typeddict-item]


def test_trouble_with_lineage_stops_no_task(
    present: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow_rankzero import RunFacts, facets, spark_properties

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

    from airflow_rankzero import Inputs, RunFacts, facets
    from rankzero import WorkerFailedError

    found = facets(
        RunFacts(
            4,
            "s3://bucket/runs/a",
            result="s3a://bucket/runs/a/result/value.json",
            inputs=Inputs(files=("/data/b/result/value.json",)),
            error=WorkerFailedError("rank 1 failed", rank=1, traceback="Traceback of rank 1"),
        )
    )
    assert found.outputs == [Dataset("s3://bucket", "runs/a/result/value.json")]
    assert found.inputs == [Dataset("file", "/data/b/result/value.json")]
    run = Serde.to_dict(found.run_facets["rankzero_run"])
    assert (run["worldSize"], run["runDirectory"]) == (4, "s3://bucket/runs/a")
    assert run["firstCause"] == "Traceback of rank 1"


def test_inputs_are_refs_paths_tables_and_queries(tmp_path: Path) -> None:
    from airflow_rankzero import Inputs, inputs_of
    from rankzero import ResultRef, Table

    ref, other = ResultRef("s3://bucket/a/value", "json", "", 0), ResultRef("/runs/b/value", "json", "", 0)
    dataset = {
        "train": "s3://bucket/rows/",
        "table": Table("/runs/c/tables/0000/rows"),
        "scored": other,
        "catalog": "db.rows",
        "query": "select a from db.left join db.right using (id)",
    }
    assert inputs_of(
        ((1, [ref]), {"again": {"ref": ref}}), dataset, {"spark.hadoop.hive.metastore.uris": "thrift://h:9083"}
    ) == (
        Inputs(
            ("s3://bucket/a/value", "s3://bucket/rows/", "/runs/c/tables/0000/rows", "/runs/b/value"),
            ("db.rows", "select a from db.left join db.right using (id)"),
            "thrift://h:9083",
        )
    )
    assert inputs_of((), tmp_path, None) == Inputs((str(tmp_path),))
    assert inputs_of((), None, None) == Inputs()
    # What cannot be told stops no task.
    assert inputs_of((), 42, None) == Inputs()


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("https://me:geheim@host:8443/t.parquet", ("https://host:8443", "t.parquet")),
        ("https://geheim@host/t.parquet", ("https://host", "t.parquet")),
        ("s3a://me:geheim@bucket/t", ("s3://bucket", "t")),
        ("https://host/t.parquet?X-Amz-Expires=60&X-Amz-Signature=geheim", ("https://host", "t.parquet")),
        ("abfs://c@a.dfs.core.windows.net/t?sv=1&sig=geheim", ("abfs://c@a.dfs.core.windows.net", "t")),
        ("s3://bucket/part-?.parquet", ("s3://bucket", "part-?.parquet")),
    ],
)
def test_the_name_of_a_data_set_has_no_credentials(uri: str, name: tuple[str, str]) -> None:
    from airflow_rankzero.openlineage.lineage import dataset_name

    assert dataset_name(uri) == name


@with_provider
def test_tables_and_queries_have_names_as_openlineage_has_them() -> None:
    from airflow_rankzero import Inputs, RunFacts, facets

    query = "select a from db.left join db.right using (id)"
    inputs = Inputs(("s3a://bucket/rows",), ("`db`.rows", query), "thrift://metastore:9083")
    found = facets(RunFacts(2, inputs=inputs))
    hive = "hive://metastore:9083"
    assert [(one.namespace, one.name) for one in found.inputs] == [
        ("s3://bucket", "rows"),
        (hive, "db.rows"),
        (hive, "db.left"),
        (hive, "db.right"),
    ]
    assert found.job_facets["sql"].query == query


@with_provider
def test_what_is_not_known_yet_is_left_out() -> None:
    from airflow_rankzero import RunFacts, facets

    found = facets(RunFacts(4))
    assert found.inputs == []
    assert found.outputs == []
    assert set(found.run_facets) == {"rankzero_run"}


@with_provider
def test_airflow_collects_the_facets_of_the_operator() -> None:
    from airflow.providers.openlineage.extractors.base import DefaultExtractor

    from airflow_rankzero import RunFacts, facets

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

    from airflow_rankzero import spark_properties

    switch_on(monkeypatch)
    run = SimpleNamespace(logical_date=datetime(2026, 1, 1, tzinfo=UTC), conf={}, clear_number=0)
    ti = SimpleNamespace(
        dag_id="digits", task_id="train", try_number=1, map_index=-1, dag_run=run, get_template_context=dict
    )
    found = spark_properties({"a": "b"}, {"ti": ti})  # type: ignore[typeddict-item]
    assert found["a"] == "b"
    assert found["spark.openlineage.parentJobName"] == "digits.train"
    assert found["spark.openlineage.rootParentJobName"] == "digits"


@with_provider
def test_a_task_tells_what_it_reads_when_it_starts_and_what_came_of_it_at_its_end(
    run_dag: Callable[..., Any], tmp_path: Path
) -> None:
    import pyarrow
    from airflow.sdk import DAG
    from pyarrow import parquet

    from airflow_rankzero import TorchDistributorOperator

    parquet.write_table(pyarrow.table({"x": [1.0, 2.0]}), tmp_path / "rows.parquet")

    class Watched(TorchDistributorOperator):
        def execute(self, context: Any) -> Any:
            seen.append(self.get_openlineage_facets_on_start())
            value = super().execute(context)
            seen.append(self.get_openlineage_facets_on_complete(context["ti"]))
            return value

    seen: list[Any] = []
    with DAG("lineage") as dag:
        Watched(
            task_id="train",
            train="builtins:int",
            op_args=["3"],
            num_processes=1,
            conn_id="here",
            store=str(tmp_path / "store"),
            dataset=str(tmp_path / "rows.parquet"),
        )
    outcome = run_dag(dag)
    assert outcome.state == "success", outcome.errors
    start, end = seen
    read = [("file", str(tmp_path / "rows.parquet"))]
    assert [(one.namespace, one.name) for one in start.inputs] == read
    assert [(one.namespace, one.name) for one in end.inputs] == read
    assert start.outputs == []
    assert [one.name.startswith(str(tmp_path / "store")) for one in end.outputs] == [True]
