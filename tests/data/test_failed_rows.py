"""Calls of `write_rows` that raise: their rows and columns are removed, and a retry writes each row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rankzero.train as rt
from rankzero import Launcher, ResultError, Table, store
from rankzero.train import rows


def _flaky(*batches: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from batches
    raise ConnectionError("the source is gone")


def _raises(name: str, *batches: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError):
        rt.write_rows(_flaky(*batches), name)


def test_a_retry_of_a_call_whose_columns_grew_writes_each_row_once() -> None:
    batches = [{"id": [1, 2, 3]}, {"id": [4], "extra": ["x"]}, {"id": [5], "more": ["y"]}]
    _raises("grown", *batches)
    table = rt.write_rows(batches, "grown").to_arrow().to_table()
    assert sorted(table["id"].to_pylist()) == [1, 2, 3, 4, 5]


def test_columns_of_a_call_that_raised_are_not_in_the_table() -> None:
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


def test_rows_that_the_store_does_not_remove_are_not_silently_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [{"id": [1]}, {"id": [2], "extra": ["x"]}]

    remove, is_down = store.remove, True

    def remove_when_up(location: str) -> None:
        if is_down:
            raise OSError("no such device")
        remove(location)

    monkeypatch.setattr(store, "remove", remove_when_up)
    monkeypatch.setattr(rows, "GROUP_BYTES", 1)
    _raises("refused", *batches)
    with pytest.raises(ResultError, match="of a call that raised cannot be removed.*no such device"):
        rt.write_rows(batches, "refused")
    is_down = False
    table = rt.write_rows(batches, "refused")
    assert sorted(table.to_arrow().to_table()["id"].to_pylist()) == [1, 2]


def _returns_what_raised() -> Table:
    def refuse(_: str) -> None:
        raise OSError("no such device")

    store.remove, rows.GROUP_BYTES = refuse, 1
    with pytest.raises(ConnectionError):
        rt.write_rows(_flaky({"id": [1]}, {"id": [2], "extra": ["x"]}))
    return rt.write_rows([])


def test_a_result_does_not_hold_rows_of_a_call_that_raised(launcher: Launcher) -> None:
    with pytest.raises(ResultError, match="of a call that raised cannot be removed"):
        launcher.options(num_processes=1).run(_returns_what_raised)


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
