"""Delta tables as datasets, read through deltalake: `make test-frameworks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher
from rankzero.submit.datasets import manifest_of_path

deltalake = pytest.importorskip("deltalake", reason="make test-frameworks")


def rows(first: int, count: int) -> Any:
    ids = list(range(first, first + count))
    return pa.table(
        {"id": ids, "x": [number / 2 for number in ids], "kind": ["even" if n % 2 == 0 else "odd" for n in ids]}
    )


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Rows 0 to 149, of two commits, in directories by kind."""
    location = str(tmp_path / "table")
    deltalake.write_deltalake(location, rows(0, 100), partition_by=["kind"])
    deltalake.write_deltalake(location, rows(100, 50), mode="append")
    return location


def seen() -> list[Any]:
    batches = rt.get_dataset_shard().iter_batches(16)
    lists = ((batch["id"].tolist(), batch["x"].tolist(), batch["kind"]) for batch in batches)
    return sorted(row for columns in lists for row in zip(*columns, strict=True))


def seen_while_it_shrinks(table: str, witness: str) -> list[Any]:
    found = seen()
    if not Path(witness).exists():
        Path(witness).touch()
        deltalake.DeltaTable(table).delete("id >= 100")
        raise ValueError("no luck")
    return found


def expected(ids: Any) -> list[Any]:
    return [(number, number / 2, "even" if number % 2 == 0 else "odd") for number in ids]


def test_its_size_is_that_of_its_rows_in_memory(tmp_path: Path) -> None:
    names = {"name": [f"{row % 7:0100}" for row in range(20_000)]}
    deltalake.write_deltalake(str(tmp_path / "table"), pa.table(names))
    assert manifest_of_path(str(tmp_path / "table"), "train").row_size == pytest.approx(104, rel=0.1)


def test_rows_that_were_deleted_are_not_read(table: str, launcher: Launcher) -> None:
    before = manifest_of_path(table, "train")
    deltalake.DeltaTable(table).delete("id % 10 = 3")
    after = manifest_of_path(table, "train")
    # What was deleted still lies there, in files that the version does not have.
    assert (before.rows, after.rows) == (150, 135)
    assert before.digest != after.digest
    assert launcher.options(num_processes=1, dataset=table).run(seen) == expected(n for n in range(150) if n % 10 != 3)


def test_a_restart_reads_the_version_with_which_the_training_began(
    table: str, launcher: Launcher, tmp_path: Path
) -> None:
    launcher = launcher.options(num_processes=1, dataset=table)
    restarted = launcher.options(max_restarts=1, restart_on=[ValueError])
    assert restarted.run(seen_while_it_shrinks, table, str(tmp_path / "witness")) == expected(range(150))
    assert launcher.run(seen) == expected(range(100))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_column_mapping_is_refused(table: str, launcher: Launcher, mode: str) -> None:
    log = Path(table, "_delta_log")
    actions = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()]
    [metadata] = [action["metaData"] for action in actions if "metaData" in action]
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
    # As Spark renames one: the files stay as they are.
    schema["fields"][1]["name"] = "renamed"
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "3"}
    renaming = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}]
    (log / f"{2:020d}.json").write_text("\n".join(map(json.dumps, renaming)))
    with pytest.raises(InvalidJobError, match=rf"{table} is a Delta table with column mapping \({mode}\).*Have Spark"):
        launcher.options(dataset=table).run(seen)


def test_deletion_vectors_are_refused(table: str) -> None:
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors"],
    }
    Path(table, "_delta_log", f"{2:020d}.json").write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(InvalidJobError, match="deletionVectors"):
        manifest_of_path(table, "train")
