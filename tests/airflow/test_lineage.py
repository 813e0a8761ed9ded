"""OpenLineage, with its provider and without."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def provider_is_here() -> bool:
    """Whether the provider is installed, without the import of Airflow that a search for its module needs."""
    return any(importlib.metadata.distributions(name="apache-airflow-providers-openlineage"))


with_provider = pytest.mark.skipif(
    not provider_is_here(), reason="apache-airflow-providers-openlineage is not installed"
)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage", None)


def test_without_the_provider_nothing_changes(absent: None) -> None:
    from airflow_rankzero.openlineage import facets

    assert facets((), "/rows", "/runs/a", "/runs/a/result/value.json") is None


def test_inputs_are_refs_paths_and_tables(tmp_path: Path) -> None:
    from airflow_rankzero.openlineage import inputs_of
    from rankzero import ResultRef, Table

    ref, other = ResultRef("s3://bucket/a/value", "json", "", 0), ResultRef("/runs/b/value", "json", "", 0)
    dataset = {
        "train": "s3://bucket/rows/",
        "table": Table("/runs/c/tables/0000/rows"),
        "scored": other,
        "catalog": "`db`.rows",
        "query": "select a from db.left",
    }
    assert inputs_of(((1, [ref]), {"again": {"ref": ref}}), dataset) == (
        ("s3://bucket", "a/value"),
        ("s3://bucket", "rows/"),
        ("file", "/runs/c/tables/0000/rows"),
        ("file", "/runs/b/value"),
        ("spark", "db.rows"),
    )
    assert inputs_of((), tmp_path) == (("file", str(tmp_path)),)


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
    from airflow_rankzero.openlineage import dataset_name

    assert dataset_name(uri) == name


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
    assert end.run_facets["rankzero_run"].runDirectory.startswith(str(tmp_path / "store"))
    assert [one.name.startswith(str(tmp_path / "store")) for one in end.outputs] == [True]
