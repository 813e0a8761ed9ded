"""Calls of `write_rows` that raise: their rows and columns are removed, and a retry writes each row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rankzero.train as rt
from rankzero import Launcher, Table


def _flaky(*batches: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from batches
    raise ConnectionError("the source is gone")


def _raises(name: str, *batches: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError):
        rt.write_rows(_flaky(*batches), name)


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
