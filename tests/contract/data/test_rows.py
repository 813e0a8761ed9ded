"""Rows that ranks write: a table that is there when the run has succeeded, and nothing of what failed."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pytest
import torch

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, ResultError, Table, WorkerFailedError, store
from rankzero.data.columns import Ragged
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


def test_a_table_has_the_rows_of_the_attempt_that_succeeded(launcher: Launcher, tmp_path: Path) -> None:
    handle = launcher.options(max_restarts=1).submit(score, True)
    ref = handle.result_ref(60)
    table = ref.load()
    assert isinstance(table, Table)
    assert table.uri == f"{handle.own.directory}/tables/0001/rows"
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


def _restarted(rows_from: int) -> tuple[Table, str | None]:
    """Reports three checkpoints, with rows from one of them on, and is killed; returns where the restart began."""
    context, checkpoint = rt.get_context(), rt.get_checkpoint()
    table = None
    for step in range(checkpoint.load()["step"] + 1 if checkpoint else 0, 4):
        if step >= rows_from and (rows_from < 3 or context.rank == 1 or context.attempt):
            table = rt.write_rows({"step": [step], "rank": [context.rank]})
        rt.barrier()
        if step < 3:
            rt.report({}, checkpoint={"step": step})
            rt.context.await_checkpoint()
        rt.barrier()
    if context.attempt == 0:
        os.kill(os.getpid(), 9)
    assert table
    return table, checkpoint.id if checkpoint else None


@pytest.mark.parametrize(("rows_from", "resumed"), [(3, "0000-000002"), (2, "0000-000001")])
def test_a_restart_writes_the_rows_behind_its_checkpoint_again(
    launcher: Launcher, rows_from: int, resumed: str
) -> None:
    table, began = launcher.options(max_restarts=1).run(_restarted, rows_from)
    assert began == resumed
    assert sorted(table.to_pandas()["step"]) == [step for step in range(rows_from, 4) for _ in range(2)]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_restart_behind_rows_is_an_error_that_names_the_table(
    launcher: Launcher, request: pytest.FixtureRequest, is_remote: bool
) -> None:
    store = f"{request.getfixturevalue('bucket')}/runs" if is_remote else launcher.store
    with pytest.raises(ResultError, match="no checkpoint can be resumed from: rows of the table 'rows' precede each"):
        launcher.options(store=store, max_restarts=1).run(_restarted, 1)


def _reported_by_rank_0() -> tuple[Table, str | None]:
    """Rank 1 is quick: it writes its rows before it can know of the only checkpoint. Rank 0 has none in its share."""
    context, checkpoint = rt.get_context(), rt.get_checkpoint()
    with contextlib.suppress(ConnectionError):
        # Nothing is left of it.
        rt.write_rows(itertools.chain([{"id": [7]}], _gone()), "other")
    if context.rank == 0:
        rt.barrier()
        if checkpoint is None:
            rt.report({}, checkpoint={"step": 0})
            rt.context.await_checkpoint()
    table = rt.write_rows({"id": [context.rank] * context.rank})
    rt.barrier()
    if context.rank == 1:
        rt.barrier()
    if context.attempt == 0:
        os.kill(os.getpid(), 9)
    return table, checkpoint and checkpoint.id


def _gone() -> Any:
    yield from ()
    raise ConnectionError("the source is gone")


def test_ranks_that_report_nothing_write_rows_behind_the_checkpoints_of_rank_0(launcher: Launcher) -> None:
    table, began = launcher.options(max_restarts=1).run(_reported_by_rank_0)
    assert (began, table.to_pandas()["id"].tolist()) == ("0000-000000", [1])


def _failing(count: int) -> Any:
    for number in range(count):
        yield {"id": torch.arange(2) + 2 * number} | ({"extra": ["x", "y"]} if number else {})
    raise RuntimeError("out of memory")


def test_nothing_that_has_appeared_of_a_call_that_raises_stays(launcher: Launcher) -> None:
    def train() -> None:
        def refuse(folder: str) -> None:
            if any(name.startswith("part") for name in os.listdir(folder)):
                raise OSError("the disk is full")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "sync_directory", refuse)
            with pytest.raises(ResultError, match="the disk is full"):
                rt.write_rows({"id": torch.arange(2)})
        with pytest.raises(RuntimeError, match="out of memory"):
            rt.write_rows(_failing(2))

    handle = launcher.submit(train)
    handle.result(60)
    assert not [path for path in Path(handle.directory).rglob("tables/**/*") if path.is_file()]


def test_a_buffer_that_a_generator_reuses_changes_no_row() -> None:
    numbers, values = numpy.zeros(2, "int64"), torch.zeros(2)
    frame = pa.RecordBatch.from_arrays([pa.array(numbers)], ["number"])

    def batches() -> Any:
        for number in range(3):
            numbers[:], values[:] = number, number
            yield {"number": numbers, "value": values}
            yield frame

    table = rt.write_rows(batches()).to_arrow().to_table()
    assert table["number"].to_pylist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert table["value"].to_pylist()[:6:4] == [0.0, 1.0]


def test_the_named_index_of_a_frame_is_a_column() -> None:
    import pandas

    frame = pandas.DataFrame({"x": [1.0, 2.0]}, index=pandas.Index([10, 20], name="id"))
    assert rt.write_rows(frame).to_arrow().to_table().to_pylist() == [{"id": 10, "x": 1.0}, {"id": 20, "x": 2.0}]
    assert rt.write_rows(frame.rename_axis(None), "unnamed").to_arrow().schema.names == ["x"]
    with pytest.raises(TypeError, match="both an index and a column named 'x'"):
        rt.write_rows(frame.rename_axis("x"))


def test_categories_of_many_batches_are_their_values() -> None:
    import pandas

    frames = [pandas.DataFrame({"c": pandas.Categorical([f"{part}-{n}" for n in range(100)])}) for part in range(3)]
    found = rt.write_rows(frames, "categories").to_arrow().to_table()
    assert found.schema.field("c").type in (pa.string(), pa.large_string())
    assert found["c"].to_pylist() == [f"{part}-{n}" for part in range(3) for n in range(100)]


def test_every_kind_of_batch_is_rows() -> None:
    # Each rank of this file's other trainings imports this module.
    import pandas

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


def test_the_name_of_each_file_of_rows_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    durable: set[str] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            durable.update(os.path.join(path, name) for name in os.listdir(path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    uri = rt.write_rows({"id": [1]}, "durable").uri
    files = [os.path.join(uri, name) for name in os.listdir(uri)]
    assert {*files, uri, os.path.dirname(uri), os.path.dirname(os.path.dirname(uri))} <= durable


def test_a_part_of_a_conjugated_tensor_is_written() -> None:
    table = rt.write_rows({"a": torch.tensor([1.0 + 2.0j]).conj().imag}, "conjugated")
    assert table.to_arrow().to_table()["a"].to_pylist() == [-2.0]


def test_what_are_no_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="different lengths"):
        rt.write_rows({"a": [1], "b": [1, 2]})
    with pytest.raises(TypeError, match=r"a column of shape \(2, 0\) has no elements in a row"):
        rt.write_rows({"a": torch.ones(2, 0)})
    with pytest.raises(TypeError, match="Field a has incompatible types: int64 vs string"):
        rt.write_rows([{"a": [1]}, {"a": ["x"]}])
    for same in ({1: [1], "1": [2]}, {"a": {1: [1], "1": [2]}}):
        with pytest.raises(TypeError, match="two columns of a batch have the name '1' as text"):
            rt.write_rows(same)
    with pytest.raises(TypeError, match="not a int"):
        rt.write_rows(7)
    with pytest.raises(TypeError, match="not a int"):
        rt.write_rows([7])
    with pytest.raises(InvalidJobError, match="cannot name a table"):
        rt.write_rows({}, "a/b")
    with pytest.raises(ResultError, match="has no files"):
        rt.write_rows([], "empty").to_arrow()


OTHER_COLUMNS: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
    ({"a": [1, 2]}, {"a": [3], "b": ["x"]}, [(1, None), (2, None), (3, "x")]),
    ({"a": [None, None]}, {"a": ["x"]}, [(None,), (None,), ("x",)]),
    # A column without any value is in no table.
    ({"a": [1], "b": [None]}, {"a": [2], "b": [None]}, [(1,), (2,)]),
]
"""The rows of rank 0, those of rank 1, and what the table holds."""


def _other_columns(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Table]:
    """Writes a table for each case; rank 0 comes first."""
    rank = rt.get_context().rank
    if rank == 1:
        rt.barrier()
    tables = [rt.write_rows(case[rank], f"case-{number}") for number, case in enumerate(cases)]
    if rank == 0:
        rt.barrier()
    return tables


def _sorted(found: Any) -> list[Any]:
    return sorted((tuple(row) for row in found), key=repr)


def test_ranks_with_other_columns_write_one_table(launcher: Launcher) -> None:
    tables = launcher.run(_other_columns, [case[:2] for case in OTHER_COLUMNS])
    for table, (_, _, expected) in zip(tables, OTHER_COLUMNS, strict=True):
        assert _sorted(row.values() for row in table.to_arrow().to_table().to_pylist()) == _sorted(expected)
        assert len(table.to_pandas()) == len(expected)


@pytest.mark.soak
def test_the_rank_whose_columns_do_not_fit_gets_the_error(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match="Field a has incompatible types: .*string") as raised:
        launcher.run(_other_columns, [({"a": [1]}, {"a": ["x"]})])
    assert (raised.value.rank, raised.value.exception_type) == (1, "TypeError")


def test_calls_and_batches_with_other_columns_write_one_table() -> None:
    rt.write_rows([{"a": [None]}, {"a": [1.0]}, {"a": [None]}, {"a": [0.5], "b": ["x"]}, {"b": ["y"]}], "calls")
    table = rt.write_rows({"c": [True]}, "calls")
    found = sorted(map(repr, table.to_arrow().to_table().select(["a", "b", "c"]).to_pylist()))
    values = [(None, None, None), (None, None, None), (1.0, None, None), (0.5, "x", None), (None, "y", None)]
    assert found == sorted(repr(dict(zip("abc", row, strict=True))) for row in [*values, (None, None, True)])
    with pytest.raises(TypeError, match="calls"):
        rt.write_rows({"c": ["x"]}, "calls")
    assert len(table.to_pandas()) == 6, "what was refused is not in the table"


# -- calls that raise: their rows and columns are removed, and a retry writes each row once


def _flaky(*batches: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from batches
    raise ConnectionError("the source is gone")


def _raises(name: str, *batches: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError):
        rt.write_rows(_flaky(*batches), name)


def test_columns_of_a_call_that_raised_are_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # A group of rows is on the disk when the call raises.
    monkeypatch.setattr(rows, "GROUP_BYTES", 1)
    _raises("columns", {"id": [1]}, {"id": [2], "extra": ["x"]})
    table = rt.write_rows({"id": [3]}, "columns")
    assert table.to_arrow().to_table().to_pydict() == {"id": [3]}
    # Neither does their type stand in the way of another one.
    rt.write_rows({"id": [4], "extra": [0.5]}, "columns")
    assert sorted(table.to_arrow().to_table()["extra"].to_pylist(), key=str) == [0.5, None]


def test_columns_of_the_calls_before_stay_when_a_call_raises() -> None:
    rt.write_rows({"id": [1], "extra": [0.5]}, "before")
    _raises("before", {"id": [2], "extra": [0.5]})
    assert rt.write_rows([], "before").to_arrow().to_table().to_pydict() == {"id": [1], "extra": [0.5]}


def _one_rank_raises() -> Table:
    context = rt.get_context()

    def batches() -> Iterator[dict[str, Any]]:
        yield {"id": [context.rank], "extra": [0.5]}
        rt.barrier()
        if context.rank == 1:
            # Behind the rank that wrote the same columns.
            rt.barrier()
            raise ConnectionError("the source is gone")

    if context.rank == 1:
        with pytest.raises(ConnectionError):
            rt.write_rows(batches())
        return rt.write_rows([])
    table = rt.write_rows(batches())
    rt.barrier()
    return table


def test_columns_of_another_rank_stay_when_a_call_raises(launcher: Launcher) -> None:
    assert launcher.run(_one_rank_raises).to_arrow().to_table().to_pydict() == {"id": [0], "extra": [0.5]}
