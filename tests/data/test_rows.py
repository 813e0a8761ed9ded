"""Rows that ranks write: a table that is there when the run has succeeded, and nothing of what failed."""

import os
import time
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rankzero.train as rt
from rankzero import Launcher, Table
from rankzero.data.columns import Ragged
from rankzero.driver.storage import remove_tables
from rankzero.errors import InvalidJobError, ResultError, WorkerFailedError
from rankzero.run.directory import RunDirectory
from rankzero.train import rows


def score(fail_first: bool) -> Table:
    context = rt.get_context()

    def batches() -> Any:
        for number in range(3):
            yield {
                "id": torch.arange(4) + 100 * context.rank + 10 * number,
                "embedding": torch.full((4, 2), float(context.rank)),
                "text": [f"r{context.rank}"] * 4,
            }

    table = rt.write_rows(batches())
    rt.barrier()
    if fail_first and context.attempt == 0 and context.rank == 1:
        os.kill(os.getpid(), 9)
    return table


def test_a_table_is_complete_and_nothing_of_a_failed_attempt_is_left(launcher: Launcher, tmp_path: Path) -> None:
    handle = launcher.options(max_restarts=1).submit(score, True)
    ref = handle.result_ref(60)
    table = ref.load()
    assert isinstance(table, Table)
    assert table.uri == f"{handle.directory}/tables/0001/rows"
    assert os.listdir(f"{handle.directory}/tables") == ["0001"]
    frame = table.to_pandas().sort_values("id")
    assert frame["id"].tolist() == [
        100 * rank + 10 * number + row for rank in (0, 1) for number in range(3) for row in range(4)
    ]
    assert frame["embedding"].iloc[-1].tolist() == [1.0, 1.0]
    assert table.to_arrow().count_rows() == 24
    # And into the next training, by its path or by reference.
    assert launcher.options(dataset=table).run(lambda: rt.get_dataset_shard().num_rows) == 24
    assert launcher.run(_count, ref) == 24


def _count(table: Table) -> int:
    return table.to_arrow().count_rows()


def test_a_run_that_fails_leaves_no_rows(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        launcher.options(run_id="failed").run(score, True)
    assert os.listdir(tmp_path / "store" / "failed" / "tables") == []


def _score_behind_a_cursor() -> Table:
    shard, checkpoint = rt.get_dataset_shard(), rt.get_checkpoint()
    if checkpoint:
        shard.load_state_dict(checkpoint.load())
        assert rt.write_rows({"id": [1]}, "another")
    for batch in shard.iter_batches(10):
        table = rt.write_rows({"id": batch["id"]})
        rt.report({}, checkpoint=shard.state_dict())
        if shard.state_dict()["consumed"][0][-1] == 3:
            while rt.get_checkpoint() is None:
                rt.report({})
                time.sleep(0.1)
            os.kill(os.getpid(), 9)
    return table


def test_a_table_does_not_lack_the_rows_of_before_its_cursor(launcher: Launcher, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": list(range(100))}), tmp_path / "ids.parquet")
    one = launcher.options(num_processes=1, dataset=str(tmp_path / "ids.parquet"), max_restarts=1)
    with pytest.raises(ResultError, match="'rows' would lack the rows"):
        one.run(_score_behind_a_cursor)


def test_a_driver_that_seemed_dead_leaves_the_rows_of_its_heir(tmp_path: Path) -> None:
    for attempt in ("0000", "0001", "0002", ".stray"):
        (tmp_path / "tables" / attempt / "rows").mkdir(parents=True)
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "value-0.json").touch()
    # The attempt 1 fails late: 0 is an earlier result, and another driver has begun with 2.
    remove_tables(RunDirectory(str(tmp_path)), range(1, 2))
    assert sorted(os.listdir(tmp_path / "tables")) == [".stray", "0000", "0002"]


def _failing(count: int) -> Any:
    for number in range(count):
        yield {"id": torch.arange(2) + 2 * number}
    raise RuntimeError("out of memory")


def _retried() -> tuple[Table, list[str]]:
    rows.GROUP_BYTES = 1
    kinds = []
    for count in (0, 2):
        try:
            rt.write_rows(_failing(count), "retried")
        except Exception as error:
            kinds.append(f"{type(error).__name__}: {error}")
    table = rt.write_rows(({"id": torch.arange(4)} for _ in range(2)), "retried")
    return table, kinds


def test_an_error_of_the_model_stays_its_own_and_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "GROUP_BYTES", 1)
    table, kinds = _retried()
    assert kinds == ["RuntimeError: out of memory"] * 2
    assert len(os.listdir(table.uri)) == 1


def test_every_kind_of_batch_is_rows() -> None:
    def schema_of(batches: Any) -> dict[str, str]:
        return {field.name: str(field.type) for field in rt.write_rows(batches).to_arrow().schema}

    assert schema_of(pandas.DataFrame({"a": [1]})) == {"a": "int64"}
    columns = {
        "a": numpy.arange(2, dtype="float32"),
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "c": Ragged(torch.arange(3), torch.tensor([0, 1, 3])),
        "d": {"x": ["1", None]},
        "e": torch.tensor([True, False]),
    }
    expected = {"a": "float", "b": "fixed_size_list<item: float>[3]", "c": "list<item: int64>"}
    table = rt.write_rows(columns, "kinds")
    found = {field.name: str(field.type) for field in table.to_arrow().schema}
    assert {**expected, "d": "struct<x: string>", "e": "bool"} == {
        name: kind.replace("element", "item") for name, kind in found.items()
    }
    assert (
        rt.write_rows([pa.table({"a": [1]}), pa.RecordBatch.from_pydict({"a": [2]})], "t").to_arrow().count_rows() == 2
    )


def test_what_are_no_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="different lengths"):
        rt.write_rows({"a": [1], "b": [1, 2]})
    with pytest.raises(TypeError, match="different columns"):
        rt.write_rows([{"a": [1]}, {"b": [1]}])
    with pytest.raises(TypeError, match="not a int"):
        rt.write_rows(7)
    with pytest.raises(TypeError, match="not a int"):
        rt.write_rows([7])
    with pytest.raises(InvalidJobError, match="cannot name a table"):
        rt.write_rows({}, "a/b")
    with pytest.raises(ResultError, match="has no files"):
        rt.write_rows([], "empty").to_arrow()


def test_rows_reach_an_object_store(bucket: str) -> None:
    handle = Launcher(2, store=f"{bucket}/runs").submit(score, False)
    table = handle.result(90)
    assert table.uri.startswith("s3://")
    assert table.to_arrow().count_rows() == 24
    launcher = Launcher(2, store=f"{bucket}/runs", dataset=table)
    assert launcher.run(_read) == [24, 24]


def test_rows_of_a_call_that_failed_are_not_in_the_table_on_an_object_store(bucket: str) -> None:
    table, kinds = Launcher(1, store=f"{bucket}/runs").run(_retried)
    assert kinds == ["RuntimeError: out of memory"] * 2
    assert sorted(table.to_pandas()["id"]) == [0, 0, 1, 1, 2, 2, 3, 3]


def _read() -> list[int]:
    shard = rt.get_dataset_shard()
    mine = [number for batch in shard.iter_batches(5, shuffle=True) for number in batch["id"].tolist()]
    return [shard.num_rows, len({number for part in rt.all_gather_object(mine) for number in part})]
