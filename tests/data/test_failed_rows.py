"""Calls of `write_rows` that raise: their rows and columns are removed, and a retry writes each row once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import rankzero.train as rt
from rankzero import Launcher, ResultError, RetryableError, Table, store
from rankzero.train.context import await_checkpoint


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
    rt.write_rows({"id": [1], "empty": [None]}, "before")
    _raises("before", {"id": [2], "empty": [None]})
    assert rt.write_rows([], "before").to_arrow().to_table().to_pydict() == {"id": [1], "empty": [None]}


def test_rows_that_the_store_does_not_remove_are_not_silently_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [{"id": [1]}, {"id": [2], "extra": ["x"]}]

    remove, is_down = store.remove, True

    def remove_when_up(location: str) -> None:
        if is_down:
            raise OSError("no such device")
        remove(location)

    monkeypatch.setattr(store, "remove", remove_when_up)
    _raises("refused", *batches)
    with pytest.raises(ResultError, match="of a call that raised cannot be removed.*no such device"):
        rt.write_rows(batches, "refused")
    is_down = False
    table = rt.write_rows(batches, "refused")
    assert sorted(table.to_arrow().to_table()["id"].to_pylist()) == [1, 2]


def _returns_what_raised() -> Table:
    def refuse(_: str) -> None:
        raise OSError("no such device")

    store.remove = refuse
    with pytest.raises(ConnectionError):
        rt.write_rows(_flaky({"id": [1]}, {"id": [2], "extra": ["x"]}))
    return rt.write_rows([])


def test_a_result_does_not_hold_rows_of_a_call_that_raised(launcher: Launcher) -> None:
    with pytest.raises(ResultError, match="of a call that raised cannot be removed"):
        launcher.options(num_processes=1).run(_returns_what_raised)


def _kept_by_a_checkpoint() -> Table:
    def batches() -> Iterator[dict[str, Any]]:
        yield {"id": [1]}
        yield {"id": [2], "extra": ["x"]}
        rt.report({}, checkpoint={"rows": 2})
        yield {"id": [3], "extra": ["y"]}
        yield {"id": [4], "more": ["z"]}
        raise ConnectionError("the source is gone")

    with pytest.raises(ConnectionError):
        rt.write_rows(batches())
    return rt.write_rows({"id": [3]})


def test_rows_of_before_a_checkpoint_stay_when_a_call_raises(launcher: Launcher) -> None:
    table = launcher.options(num_processes=1).run(_kept_by_a_checkpoint).to_arrow().to_table().sort_by("id")
    assert table.to_pydict() == {"id": [1, 2, 3], "extra": [None, "x", None]}


def _one_rank_raises() -> Table:
    context = rt.get_context()

    def batches() -> Iterator[dict[str, Any]]:
        yield {"id": [context.rank], "empty": [None]}
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
    assert launcher.run(_one_rank_raises).to_arrow().to_table().to_pydict() == {"id": [0], "empty": [None]}


def _writes_on_rank_1() -> None:
    context = rt.get_context()
    if context.rank == 1:
        rt.write_rows({"attempt": [context.attempt]})
    rt.report({}, checkpoint={}, sharded=True)
    await_checkpoint()
    rt.barrier()
    if context.attempt == 0:
        raise RetryableError("preempted")


@pytest.mark.soak
def test_a_rank_that_does_not_ask_for_the_checkpoint_does_not_write_rows_twice(launcher: Launcher) -> None:
    with pytest.raises(ResultError, match="would get them twice: call get_checkpoint"):
        launcher.options(max_restarts=1).run(_writes_on_rank_1)


def test_a_repetition_after_a_refused_checkpoint_writes_each_row_once(launcher: Launcher) -> None:
    def rows(checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(4):
            yield {"id": [number]}
            if number == 1:
                rt.report({}, checkpoint=checkpoint)

    def train() -> Table:
        with pytest.raises(ResultError, match="cannot pickle"):
            rt.write_rows(rows({"lock": threading.Lock()}))
        return rt.write_rows(rows({"id": 1}))

    table = launcher.options(num_processes=1).run(train)
    assert sorted(table.to_arrow().to_table()["id"].to_pylist()) == [0, 1, 2, 3]


def test_a_checkpoint_from_a_signal_handler_loses_no_row_that_is_being_taken(launcher: Launcher) -> None:
    """The handler comes when the generator has counted a batch, and the batch is not written yet."""

    class Column:
        """Stands for a conversion that takes time, in which the signal arrives."""

        def __init__(self, number: int) -> None:
            self.number = number

        def __len__(self) -> int:
            return 1

        def __arrow_array__(self, type: object = None) -> Any:
            import pyarrow as pa

            if self.number == 3 and rt.get_context().attempt == 0:
                signal.raise_signal(signal.SIGUSR1)
            return pa.array([self.number])

    def train() -> Table:
        checkpoint = rt.get_checkpoint()
        state = checkpoint.load() if checkpoint else {"next": 0}

        def save_and_end(*_: object) -> None:
            rt.report({}, checkpoint=dict(state))
            await_checkpoint()
            raise RetryableError("preempted")

        signal.signal(signal.SIGUSR1, save_and_end)

        def rows() -> Iterator[dict[str, Any]]:
            while state["next"] < 6:
                number = state["next"]
                state["next"] += 1
                yield {"id": Column(number)}
                if number == 1:
                    rt.report({}, checkpoint=dict(state))
                    await_checkpoint()

        return rt.write_rows(rows())

    launcher = launcher.options(num_processes=1, max_restarts=1, run_id="handler")
    table = launcher.run(train)
    assert sorted(table.to_arrow().to_table()["id"].to_pylist()) == list(range(6))
    handle = launcher.find()
    assert handle
    assert any("is left out" in line for line in handle.logs(rank=0))
    assert [event["id"] for event in handle.events() if event["type"] == "checkpoint"] == ["0000-000000"]
