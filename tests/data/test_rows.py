"""Rows that ranks write: a table that is there when the run has succeeded, and nothing of what failed."""

import contextlib
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.kit import SlotsEngine

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, ResultError, Table, WorkerFailedError, store
from rankzero.data.columns import Ragged
from rankzero.data.table import file_of
from rankzero.driver.storage import remove_leftovers, remove_values
from rankzero.driver.tables import carry_rows, remove_rows
from rankzero.run.directory import RunDirectory
from rankzero.store import remote
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


ROWS = 100
DEATHS = [
    # Slots, the rank that dies, its batch, and where: before its rows, behind them, the checkpoint, or its commit.
    (2, 0, 1, "committed"),
    (3, 1, 3, "rows"),
    (1, 0, 2, "before"),
    (2, 1, 2, "checkpoint"),
]


def _scored_by_changing_worlds(slots: str) -> tuple[Table, Table]:
    world, shard = rt.get_context(), rt.get_dataset_shard()
    if checkpoint := rt.get_checkpoint():
        shard.load_state_dict(checkpoint.load(rank=0))

    def passed(batch: int, place: str) -> None:
        if world.attempt < len(DEATHS) and DEATHS[world.attempt][1:] == (world.rank, batch, place):
            following = DEATHS[world.attempt + 1 :] or [(2,)]
            Path(slots).write_text(str(following[0][0]))
            os.kill(os.getpid(), 9)

    def scored() -> Any:
        for number, batch in enumerate(shard.iter_batches(3, shuffle=True, pad=False)):
            passed(number, "before")
            rt.write_rows({"id": batch["id"]}, "calls")
            yield {"id": batch["id"], "attempt": [world.attempt] * len(batch["id"])}
            passed(number, "rows")
            before = rt.get_checkpoint()
            rt.report({}, checkpoint=shard.state_dict(), sharded=True)
            passed(number, "checkpoint")
            while world.attempt < len(DEATHS) and getattr(rt.get_checkpoint(), "id", "") == getattr(before, "id", ""):
                rt.report({})
                time.sleep(0.01)
            passed(number, "committed")

    table = rt.write_rows(scored())
    return table, rt.write_rows([], "calls")


def test_every_row_is_scored_once_however_often_ranks_die_and_worlds_change(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    pq.write_table(pa.table({"id": list(range(ROWS))}), tmp_path / "ids.parquet")
    slots = tmp_path / "slots"
    slots.write_text(str(DEATHS[0][0]))
    elastic = launcher.options(
        num_processes=(1, 3),
        engine=SlotsEngine(str(slots)),
        dataset=str(tmp_path / "ids.parquet"),
        max_restarts=len(DEATHS),
        run_id="scored",
    )
    generated, called = elastic.run(_scored_by_changing_worlds, str(slots))
    for table in (generated, called):
        assert sorted(table.to_pandas()["id"]) == list(range(ROWS))
    # Rows of several attempts, and nothing but the table that was returned.
    assert len(set(generated.to_pandas()["attempt"])) > 2
    assert os.listdir(tmp_path / "store" / "scored" / "tables") == [f"{len(DEATHS):04d}"]


def _begins_anew(slots: str) -> Table:
    table = rt.write_rows({"id": [rt.get_context().attempt]})
    rt.report({}, checkpoint={"epoch": 1})
    while rt.get_checkpoint() is None and rt.get_context().attempt == 0:
        time.sleep(0.01)
    if rt.get_context().attempt == 0:
        os.kill(os.getpid(), 9)
    return table


def test_an_attempt_that_begins_anew_does_not_write_rows_twice(launcher: Launcher) -> None:
    with pytest.raises(ResultError, match="would get them twice: call get_checkpoint"):
        launcher.options(num_processes=1, max_restarts=1).run(_begins_anew, "")


def _whole() -> None:
    rt.write_rows({"id": [rt.get_context().rank]})
    rt.barrier()
    if rt.get_context().rank:
        rt.report({}, checkpoint={})
    rt.barrier()


@pytest.mark.soak
def test_rows_of_all_ranks_do_not_belong_to_a_checkpoint_of_rank_0(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 has written rows.*sharded=True"):
        launcher.run(_whole)


def _scored_in_epochs() -> Table:
    world, checkpoint = rt.get_context(), rt.get_checkpoint()
    for epoch in range(checkpoint.load()["epoch"] + 1 if checkpoint else 0, 3):
        table = rt.write_rows({"epoch": [epoch] * 3})
        rt.barrier()
        if world.rank == 0:
            rt.report({}, checkpoint={"epoch": epoch})
            rt.context.await_checkpoint()
            if (world.attempt, epoch) == (0, 1):
                os.kill(os.getpid(), 9)
        rt.barrier()
    return table


def test_rows_of_ranks_that_report_nothing_are_not_lost_at_a_restart(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 has written rows.*sharded=True") as raised:
        launcher.options(max_restarts=1).run(_scored_in_epochs)
    assert (raised.value.rank, raised.value.exception_type) == (0, "ValueError")


@pytest.mark.soak
def test_rows_of_ranks_that_report_nothing_are_not_lost_on_an_object_store(bucket: str) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 has written rows.*sharded=True"):
        Launcher(2, store=f"{bucket}/runs", max_restarts=1).run(_scored_in_epochs)


def test_each_client_lists_the_files_below_a_directory(bucket: str) -> None:
    for name in ("a/x.txt", "a/b/y.txt", "c/z.txt"):
        store.write_bytes(f"{bucket}/{name}", b"1")
    clients = list(remote.clients(bucket))
    assert len(clients) == 2
    for client in clients:
        assert {name for name in client.names_below(f"{bucket}/a") if name} >= {"x.txt", "y.txt"}
        assert "z.txt" not in client.names_below(f"{bucket}/a")
        assert client.names_below(f"{bucket}/none") == []


def _trained_then_scored() -> Table:
    if rt.get_checkpoint() is None and rt.get_context().rank == 0:
        rt.report({}, checkpoint={"epoch": 1})
    rt.barrier()
    table = rt.write_rows({"id": [rt.get_context().rank]})
    rt.barrier()
    if rt.get_context().rank == 0 and rt.get_context().attempt == 0:
        rt.context.await_checkpoint()
        os.kill(os.getpid(), 9)
    rt.barrier()
    return table


@pytest.mark.soak
def test_all_ranks_write_rows_after_the_last_checkpoint_of_rank_0(launcher: Launcher) -> None:
    table = launcher.options(max_restarts=1).run(_trained_then_scored)
    assert sorted(table.to_pandas()["id"]) == [0, 1]
    assert "/0001/" in table.uri


def _whole_beside_a_rank_without_rows() -> Table:
    table = rt.write_rows([{"id": [1]}] if rt.get_context().rank == 0 else [])
    rt.report({}, checkpoint={"step": 1})
    rt.barrier()
    return table


@pytest.mark.soak
def test_a_checkpoint_of_rank_0_is_taken_where_the_others_had_no_row_to_write(launcher: Launcher) -> None:
    assert launcher.run(_whole_beside_a_rank_without_rows).to_arrow().count_rows() == 1


def _score_behind_a_cursor(file: str) -> Table | None:
    """Rank 0 scores a batch in each attempt, behind the cursor in its checkpoint, or in a newer file."""
    shard, checkpoint = rt.get_dataset_shard(), rt.get_checkpoint()
    if checkpoint:
        shard.load_state_dict(json.loads(Path(file).read_text()) if file else checkpoint.load())
    batches = shard.iter_batches(10)
    ids = next(batches)["id"]
    if rt.get_context().rank:
        return None
    if checkpoint is None and file:
        rt.report({}, checkpoint={})
    table = rt.write_rows({"id": ids})
    if checkpoint is None:
        if file:
            Path(file).write_text(json.dumps(shard.state_dict()))
        else:
            rt.report({}, checkpoint=shard.state_dict())
        rt.context.await_checkpoint()
        os.kill(os.getpid(), 9)
    return table


@pytest.fixture
def ids(launcher: Launcher, tmp_path: Path) -> Launcher:
    """A launcher with a dataset of numbers."""
    pq.write_table(pa.table({"id": list(range(ROWS))}), tmp_path / "ids.parquet")
    return launcher.options(dataset=str(tmp_path / "ids.parquet"), max_restarts=1)


def test_a_table_does_not_lack_the_rows_of_before_its_cursor(ids: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="'rows' would lack rows"):
        ids.run(_score_behind_a_cursor, str(tmp_path / "cursor.json"))


@pytest.mark.soak
def test_rows_of_rank_0_alone_belong_to_its_whole_checkpoint(ids: Launcher) -> None:
    table = ids.run(_score_behind_a_cursor, "")
    assert table
    found = table.to_pandas()["id"].tolist()
    assert (len(found), len(set(found))) == (20, 20)


def test_a_driver_that_seemed_dead_leaves_the_rows_of_its_heir(tmp_path: Path) -> None:
    for attempt in ("0000", "0001", "0002", ".stray"):
        (tmp_path / "tables" / attempt / "rows").mkdir(parents=True)
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "value-0.json").touch()
    # The attempt 1 fails late: 0 is an earlier result, and another driver has begun with 2.
    remove_rows(RunDirectory(str(tmp_path)), range(1, 2), {})
    assert sorted(os.listdir(tmp_path / "tables")) == [".stray", "0000", "0002"]


def test_files_of_the_user_beside_rows_and_values_stay(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    schema = f"_schema-{'0a' * 8}-0000-00000-000000.arrow"
    unfinished = f".writing-{'0a' * 8}"
    ours = [f"0000/rows/{name}" for name in (file_of(0, 0, 0), file_of(0, 1, 0), schema, unfinished)]
    mine = ["0000/notes.txt", "0000/rows/part-of-a-book.parquet", "0000/rows/_schema-of-it.txt", "0000/a/b/c.txt"]
    for name in [*ours, "0001/rows/" + file_of(1, 0, 0), *mine]:
        (tmp_path / "tables" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tables" / name).write_text("text")
    (tmp_path / "result").mkdir()
    for name in (unfinished, ".committing-12.json", ".upload-0-checkpoint-1-0", ".env", "value-0.of-gold.txt"):
        (tmp_path / "result" / name).write_text("text")

    carry_rows(run, 2, {"rows": {"0": {"0": 1}}})
    assert store.list_files(run.path("tables", "0002", "rows")) == [schema, file_of(0, 0, 0)]
    remove_leftovers(run, range(2))
    assert store.list_files(run.path("result")) == [".env", "value-0.of-gold.txt"]
    remove_values(run, range(2))
    assert store.list_files(run.path("result")) == [".env", "value-0.of-gold.txt"]
    assert sorted(os.listdir(tmp_path / "tables")) == ["0000", "0002"]
    assert store.list_files(run.path("tables", "0000")) == sorted(name[5:] for name in mine)


FILES = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4)), max_size=12)
KEPT = st.dictionaries(st.integers(0, 2), st.dictionaries(st.integers(0, 2), st.integers(0, 5)))


@given(FILES, KEPT, st.integers(0, 12))
def test_a_driver_that_dies_while_it_carries_rows_loses_none(
    files: set[tuple[int, int, int]], kept: dict[int, dict[int, int]], moves: int
) -> None:
    """Files are attempt, rank and number; attempt 3 carries some of them and dies, and attempt 4 carries all."""
    written = {"t": {str(attempt): {str(rank): n for rank, n in of.items()} for attempt, of in kept.items()}}
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patched:
        run = RunDirectory(home)
        for file in files:
            path = Path(run.path("tables", f"{file[0]:04d}", "t", file_of(*file)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        left = iter(range(moves))
        upload = store.upload
        patched.setattr(store, "upload", lambda *paths: upload(*paths) if next(left, None) is not None else _die())
        with contextlib.suppress(ZeroDivisionError):
            carry_rows(run, 3, written)
            remove_rows(run, range(3), {})
        patched.undo()
        remove_rows(run, range(3, 4), written)
        carry_rows(run, 4, written)
        remove_rows(run, range(4), {})
        found = {str(path.relative_to(home)) for path in Path(home).rglob("*.parquet")}
    expected = [file for file in files if file[2] < kept.get(file[0], {}).get(file[1], 0)]
    assert found == {f"tables/0004/t/{file_of(*file)}" for file in expected}


def _die() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("place", ["local", "without links", "object store"])
def test_rows_of_a_delivered_table_are_copied_into_a_later_attempt(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "without links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    run = RunDirectory(f"memory://{tmp_path.name}/run" if place == "object store" else str(tmp_path))
    for path in (run.path("result", "value-0.json"), run.path("tables", "0000", "t", file_of(0, 0, 0))):
        store.make_directory(path.rpartition("/")[0])
        store.write_bytes(path, b"rows")
    # As in Ray Train, where a run that has succeeded resumes by its name.
    for attempt in (1, 1, 2):
        carry_rows(run, attempt, {"t": {"0": {"0": 1}}})
        for folder in ("0000", f"{attempt:04d}"):
            assert store.read_bytes(run.path("tables", folder, "t", file_of(0, 0, 0))) == b"rows"
    assert store.list_names(run.path("tables", "0002", "t")) == [file_of(0, 0, 0)]


def _failing(count: int) -> Any:
    for number in range(count):
        yield {"id": torch.arange(2) + 2 * number} | ({"extra": ["x", "y"]} if number else {})
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
    assert len([name for name in os.listdir(table.uri) if name.startswith("part")]) == 1


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


def test_arrays_of_other_byte_orders_and_classes_are_rows() -> None:
    columns = {"big": numpy.array([1, 2], ">i4"), "matrix": numpy.matrix([[1.0], [2.0]]), "plain": numpy.array([3, 4])}
    found = rt.write_rows(columns, "orders").to_arrow().to_table().to_pydict()
    assert found == {"big": [1, 2], "matrix": [[1.0], [2.0]], "plain": [3, 4]}


def test_the_named_index_of_a_frame_is_a_column() -> None:
    import pandas

    frame = pandas.DataFrame({"x": [1.0, 2.0]}, index=pandas.Index([10, 20], name="id"))
    assert rt.write_rows(frame).to_arrow().to_table().to_pylist() == [{"id": 10, "x": 1.0}, {"id": 20, "x": 2.0}]
    assert rt.write_rows(frame.rename_axis(None), "unnamed").to_arrow().schema.names == ["x"]
    with pytest.raises(TypeError, match="both an index and a column named 'x'"):
        rt.write_rows(frame.rename_axis("x"))


def _score_at_a_pace_of_its_own(cadence: list[int], part: int, through: str) -> Table:
    """Each rank reports after batches of its own, and rank 0 dies in the first attempt."""
    context = rt.get_context()
    shard, checkpoint = rt.get_dataset_shard(), rt.get_checkpoint()
    if through == "loader":
        loader = torch.utils.data.DataLoader(shard.to_torch(2, pad=False), batch_size=None)
        source: Any = rt.prepare_data_loader(loader)
    else:
        source = shard
    if checkpoint:
        source.load_state_dict(checkpoint.load(rank=part))

    def scored() -> Any:
        reported = 0
        for number, batch in enumerate(source if through == "loader" else shard.iter_batches(2, pad=False), 1):
            yield {"id": batch["id"]}
            if number % cadence[context.rank] == 0:
                rt.report({}, checkpoint=source.state_dict(), sharded=True)
                reported += 1
                if reported == 2 and context.attempt == 0:
                    rt.context.await_checkpoint()
                    if context.rank == 0:
                        os.kill(os.getpid(), 9)
                    time.sleep(60)

    return rt.write_rows(scored())


@pytest.mark.parametrize(
    ("cadence", "part", "through"),
    [
        ([2, 1], 0, "shard"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (([2, 1], 1, "shard"), ([1, 3], 0, "shard"))),
        pytest.param([1, 2], 0, "loader", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_report_at_different_batches_lose_and_double_no_row(
    ids: Launcher, cadence: list[int], part: int, through: str
) -> None:
    table = ids.run(_score_at_a_pace_of_its_own, cadence, part, through)
    found = table.to_pandas()["id"].tolist()
    assert sorted(found) == list(range(ROWS))


def test_categories_of_many_batches_are_their_values() -> None:
    import pandas

    frames = [pandas.DataFrame({"c": pandas.Categorical([f"{part}-{n}" for n in range(100)])}) for part in range(3)]
    found = rt.write_rows(frames, "categories").to_arrow().to_table()
    assert found.schema.field("c").type in (pa.string(), pa.large_string())
    assert found["c"].to_pylist() == [f"{part}-{n}" for part in range(3) for n in range(100)]


def _score_two_datasets(directory: str) -> tuple[Table, Table]:
    """Reads two datasets at paces of their own; each rank reports after each round, and rank 0 dies once."""
    context, checkpoint = rt.get_context(), rt.get_checkpoint()
    shards = {name: rt.get_dataset_shard(name) for name in ("a", "b")}
    if checkpoint:
        for name, state in checkpoint.load(rank=0).items():
            shards[name].load_state_dict(state)
    batches = {name: iter(shard.iter_batches(2, pad=False)) for name, shard in shards.items()}

    def rows(name: str, count: int) -> Any:
        for batch in itertools.islice(batches[name], count):
            rt.write_rows({"id": batch["id"]}, name)

    for number in range(30):
        # Rank 1 is ahead in one dataset, where it is as rank 0 in the other.
        rows("a", 2 if context.rank == 0 else 1)
        rows("b", 1 if context.rank == 0 else 2)
        rt.report({}, checkpoint={name: shard.state_dict() for name, shard in shards.items()}, sharded=True)
        if context.attempt == 0 and number == 3:
            rt.context.await_checkpoint()
            if context.rank == 0:
                os.kill(os.getpid(), 9)
            time.sleep(60)
    return rt.write_rows([], "a"), rt.write_rows([], "b")


@pytest.mark.soak
def test_each_dataset_of_a_checkpoint_has_its_own_positions(launcher: Launcher, tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"id": list(range(60))}), tmp_path / f"{name}.parquet")
    datasets = {name: str(tmp_path / f"{name}.parquet") for name in ("a", "b")}
    tables = launcher.options(dataset=datasets, max_restarts=1).run(_score_two_datasets, str(tmp_path))
    for table in tables:
        assert sorted(table.to_pandas()["id"].tolist()) == list(range(60))


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
    ({"a": torch.tensor([1, 2], dtype=torch.int32)}, {"a": [1.5]}, [(1.0,), (2.0,), (1.5,)]),
    ({"a": torch.tensor([1], dtype=torch.int32)}, {"a": torch.tensor([1 << 40])}, [(1,), (1 << 40,)]),
    ({"a": torch.tensor([0.5])}, {"a": torch.tensor([0.1], dtype=torch.float64)}, [(0.5,), (0.1,)]),
    ({"a": [None, None]}, {"a": ["x"]}, [(None,), (None,), ("x",)]),
    ({"a": [1], "b": [None]}, {"a": [2], "b": [None]}, [(1, None), (2, None)]),
    ({"a": {"x": torch.ones(1)}}, {"a": [{"x": 0.1}]}, [({"x": 1.0},), ({"x": 0.1},)]),
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
def test_spark_reads_a_table_of_ranks_with_other_columns(launcher: Launcher, session: Any) -> None:
    tables = launcher.run(_other_columns, [case[:2] for case in OTHER_COLUMNS])
    for table, (_, _, expected) in zip(tables, OTHER_COLUMNS, strict=True):
        plain = (
            [value.asDict() if hasattr(value, "asDict") else value for value in row]
            for row in table.to_spark(session).collect()
        )
        assert _sorted(plain) == _sorted(expected)


@pytest.mark.soak
def test_the_rank_whose_columns_do_not_fit_gets_the_error(launcher: Launcher) -> None:
    with pytest.raises(WorkerFailedError, match="Field a has incompatible types: int64 vs string") as raised:
        launcher.run(_other_columns, [({"a": [1]}, {"a": ["x"]})])
    assert (raised.value.rank, raised.value.exception_type) == (1, "TypeError")


def test_calls_and_batches_with_other_columns_write_one_table() -> None:
    first = torch.ones(1, dtype=torch.int32)
    rt.write_rows([{"a": [None]}, {"a": first}, {"a": [None]}, {"a": [0.5], "b": ["x"]}, {"b": ["y"]}], "calls")
    table = rt.write_rows({"c": [True]}, "calls")
    found = sorted(map(repr, table.to_arrow().to_table().select(["a", "b", "c"]).to_pylist()))
    values = [(None, None, None), (None, None, None), (1.0, None, None), (0.5, "x", None), (None, "y", None)]
    assert found == sorted(repr(dict(zip("abc", row, strict=True))) for row in [*values, (None, None, True)])
    with pytest.raises(TypeError, match="calls"):
        rt.write_rows({"c": ["x"]}, "calls")
    assert len(table.to_pandas()) == 6, "what was refused is not in the table"


@pytest.mark.soak
def test_spark_reads_times_and_half_precision(session: Any) -> None:
    import pandas

    frame = pandas.DataFrame({"t": pandas.to_datetime(["2024-01-02 03:04:05.123456789", None]), "id": [0, 1]})
    frame["zone"] = frame["t"].dt.tz_localize("UTC")
    half = torch.tensor([0.5, 1.5], dtype=torch.float16)
    table = rt.write_rows({**{name: frame[name] for name in frame}, "half": half}, "times")
    row, empty = table.to_spark(session).orderBy("id").collect()
    assert str(row.t) == "2024-01-02 03:04:05.123456"
    assert (empty.t, [row.half, empty.half]) == (None, [0.5, 1.5])


@pytest.mark.soak
def test_rows_reach_an_object_store(bucket: str) -> None:
    handle = Launcher(2, store=f"{bucket}/runs").submit(score, False)
    table = handle.result(90)
    assert table.uri.startswith("s3://")
    assert table.to_arrow().count_rows() == 24
    launcher = Launcher(2, store=f"{bucket}/runs", dataset=table)
    assert launcher.run(_read) == [24, 24]


def _killed_behind_a_checkpoint() -> Table:
    is_new = rt.get_checkpoint() is None
    table = rt.write_rows({"attempt": [rt.get_context().attempt]})
    if is_new:
        rt.report({}, checkpoint={"rows": 1})
        while rt.get_checkpoint() is None:
            time.sleep(0.01)
        rt.write_rows({"attempt": [-1]})
        os.kill(os.getpid(), 9)
    return table


def test_rows_of_before_a_checkpoint_are_carried_on_an_object_store(bucket: str) -> None:
    table = Launcher(1, store=f"{bucket}/runs", max_restarts=1).run(_killed_behind_a_checkpoint)
    assert sorted(table.to_pandas()["attempt"]) == [0, 1]
    assert "/tables/0001/" in table.uri


@pytest.mark.soak
def test_rows_of_a_call_that_failed_are_not_in_the_table_on_an_object_store(bucket: str) -> None:
    table, kinds = Launcher(1, store=f"{bucket}/runs").run(_retried)
    assert kinds == ["RuntimeError: out of memory"] * 2
    found = table.to_arrow().to_table()
    assert (found.schema.names, sorted(found["id"].to_pylist())) == (["id"], [0, 0, 1, 1, 2, 2, 3, 3])


def _read() -> list[int]:
    shard = rt.get_dataset_shard()
    mine = [number for batch in shard.iter_batches(5, shuffle=True) for number in batch["id"].tolist()]
    return [shard.num_rows, len({number for part in rt.all_gather_object(mine) for number in part})]
