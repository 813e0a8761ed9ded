"""Tables at a path, read by ranks without Spark."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tries.identities import identity_by

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, ResultError, SparkEngine, store
from rankzero.data import order, reader
from rankzero.data.files import filesystem_of
from rankzero.data.manifest import Manifest
from rankzero.submit import datasets
from rankzero.submit.datasets import manifest_of_path
from rankzero.train import DatasetShard, TrainContext


def table(rows: int, first: int = 0) -> Any:
    ids = range(first, first + rows)
    columns = {"id": list(ids), "x": [number / 2 for number in ids], "name": [f"n{number}" for number in ids]}
    return pa.table(columns, pa.schema({"id": pa.int64(), "x": pa.float64(), "name": pa.string()}))


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A table of 1003 rows in three files of row groups of 100."""
    folder = tmp_path / "table"
    folder.mkdir()
    for number, (rows, first) in enumerate([(500, 0), (0, 500), (503, 500)]):
        pq.write_table(table(rows, first), folder / f"{number}.parquet", row_group_size=100)
    (folder / "_SUCCESS").touch()
    return folder


def shard_of(manifest: Manifest, rank: int = 0, world_size: int = 1) -> DatasetShard:
    return DatasetShard(manifest, TrainContext(rank=rank, world_size=world_size), "train")


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def test_a_parquet_table_is_read_in_its_order(parquet: Path, tmp_path: Path) -> None:
    shard = shard_of(manifest_of_path(str(parquet), "train"))
    assert (shard.num_rows, len(shard), shard.columns) == (1003, 1003, ["id", "x", "name"])
    batches = list(shard.iter_batches(64))
    assert [len(batch["x"]) for batch in batches] == [64] * 15 + [43]
    assert ids_of(batches) == list(range(1003))
    assert batches[1]["name"][0] == "n64"
    assert batches[1]["x"][0] == 32.0


def test_views_and_extension_types_are_read_as_what_they_store(tmp_path: Path) -> None:
    pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.float32).reshape(2, 2, 2))
    columns = {
        "id": pa.array([1, 2]),
        "text": pa.array(["a", "a text longer than twelve"], pa.string_view()),
        "data": pa.array([b"x", None], pa.binary_view()),
        "key": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, b"1" * 16], pa.binary(16))),
        "pixels": pixels,
    }
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    shard = shard_of(manifest_of_path(str(path), "train"))
    for shuffle in (False, True):
        [batch] = shard.iter_batches(2, shuffle=shuffle)
        order = [number - 1 for number in batch["id"].tolist()]
        assert [batch["text"][order.index(number)] for number in (0, 1)] == ["a", "a text longer than twelve"]
        assert sorted(batch["data"], key=str) == [None, b"x"]
        assert sorted(batch["key"]) == [b"0" * 16, b"1" * 16]
        assert batch["pixels"][order].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_categories_of_several_files_are_shuffled(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    names = [[f"{file}-{number}" for number in range(100)] for file in range(2)]
    for number, each in enumerate(names):
        # 100 categories have numbers of 8 bits, which those of two files exceed together.
        column = pa.array(pd.Categorical(each))
        rows = pa.table({"name": column, "inner": pa.StructArray.from_arrays([column], ["name"])})
        pq.write_table(rows, folder / f"{number}.parquet")
    shard = shard_of(manifest_of_path(str(folder), "train"))
    batches = list(shard.iter_batches(64, shuffle=True))
    found = [name for batch in batches for name in batch["name"]]
    assert sorted(found) == sorted([*names[0], *names[1]])
    assert found == [name for batch in batches for name in batch["inner"]["name"]]


def test_columns_in_the_names_of_directories_are_columns(tmp_path: Path) -> None:
    pq.write_to_dataset(
        pa.table({"id": range(10), "day": [f"2026-01-0{1 + number // 5}" for number in range(10)], "n": [7] * 10}),
        tmp_path / "t",
        partition_cols=["day", "n"],
    )
    shard = shard_of(manifest_of_path(str(tmp_path / "t"), "train"))
    [batch] = shard.iter_batches(10)
    assert batch["day"] == ["2026-01-01"] * 5 + ["2026-01-02"] * 5
    assert batch["n"].tolist() == [7] * 10
    [batch] = shard.iter_batches(10, columns=["n"])
    assert list(batch) == ["n"]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 30),
    st.booleans(),
    st.data(),
)
def test_any_partitioning_any_worlds_every_row_once(
    tmp_path: Path, parts: list[int], worlds: list[int], size: int, shuffle: bool, data: Any
) -> None:
    """An epoch that is begun by one world and gone on with by others."""
    if not sum(parts):
        return
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, rows in enumerate(parts):
        pq.write_table(table(rows, sum(parts[:number])), folder / f"{number}.parquet", row_group_size=17)
    manifest = manifest_of_path(str(folder), "train")
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for turn, world in enumerate(worlds):
        stops = data.draw(st.integers(0, 4)) if turn < len(worlds) - 1 else None
        states = []
        for rank in range(world):
            shard = shard_of(manifest, rank, world)
            if state:
                shard.load_state_dict(state)
            batches = shard.iter_batches(size, shuffle=shuffle, seed=5, prefetch=0)
            for batch in itertools.islice(batches, stops):
                seen += batch["id"].tolist()
            states.append(shard.state_dict() if stops else state)
        assert all(each == states[0] for each in states)
        # A rank that got to the end of the epoch has nothing left to resume.
        if stops and states[0] and states[0]["epoch"] == 1:
            break
        state = states[0]
    assert set(seen) == set(range(sum(parts)))
    # Where a rank had no row left for a last batch one came again.
    assert len(seen) - len(set(seen)) <= sum(worlds)


@pytest.mark.parametrize("worlds", [(2, 3), (4, 1), (5, 2)])
def test_without_padding_no_row_comes_twice(parquet: Path, tmp_path: Path, worlds: tuple[int, int]) -> None:
    manifest = manifest_of_path(str(parquet), "train")
    seen, repeated = [], []
    state: dict[str, Any] = {}
    for rank in range(worlds[0]):
        shard = shard_of(manifest, rank, worlds[0])
        batches = shard.iter_batches(1, shuffle=True, pad=False, prefetch=0)
        seen += ids_of(itertools.islice(batches, 200))
        state = shard.state_dict() if len(shard) > 200 else {}
    for rank in range(worlds[1]) if state else ():
        for found, pad in ((seen, False), (repeated, True)):
            shard = shard_of(manifest, rank, worlds[1])
            shard.load_state_dict(state)
            found += ids_of(shard.iter_batches(1, shuffle=True, pad=pad, prefetch=0))
    assert sorted(seen) == list(range(1003))
    assert len(repeated) % worlds[1] == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["files", "row group"])
def test_more_text_than_one_arrow_column_of_it_has_place_for(tmp_path: Path, kind: str) -> None:
    texts = [f"{row} ".ljust(1 << 28) for row in range(9)]
    data = pa.table({"row": list(range(9)), "text": pa.chunked_array([[text] for text in texts])})
    options = {"use_dictionary": False, "compression": "zstd", "write_statistics": False, "write_batch_size": 1}
    (tmp_path / "table").mkdir()
    for number in range(9 if kind == "files" else 1):
        rows = data.slice(number, 1) if kind == "files" else data
        pq.write_table(rows, tmp_path / "table" / f"{number}.parquet", **options)
    seen = []
    for batch in shard_of(manifest_of_path(str(tmp_path / "table"), "train")).iter_batches(2, shuffle=True):
        seen += batch["row"].tolist()
        assert batch["text"] == [texts[row] for row in batch["row"].tolist()]
    assert sorted(seen) == list(range(9))


def test_a_batch_that_is_written_to_does_not_change_the_next_epoch(tmp_path: Path) -> None:
    pq.write_table(table(100), tmp_path / "t.parquet")
    shard = shard_of(manifest_of_path(str(tmp_path / "t.parquet"), "train"))
    for _ in range(2):
        for batch in shard.iter_batches(30):
            assert batch["x"].sum() == batch["id"].sum() / 2
            batch["x"] /= 255
            batch["id"] += 1
            batch["x"] *= 255
            batch["x"] += 0.5


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("groups", [1, 100])
def test_many_files_and_groups_need_few_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int, is_whole: bool
) -> None:
    if not is_whole:
        monkeypatch.setattr(order, "WINDOW", 400 * order.LEAST)
    monkeypatch.setattr(reader, "FILES", 5)
    rows = pa.table({"id": list(range(10)) * groups})
    for number in range(100 // groups):
        pq.write_table(rows, tmp_path / f"{number:03d}.parquet", row_group_size=10)
    shard = shard_of(manifest_of_path(str(tmp_path), "train"))
    before = len(os.listdir("/dev/fd"))
    for shuffle in (False, True):
        kept = []
        for batch in shard.iter_batches(10, shuffle=shuffle, prefetch=0):
            kept.append(batch)
            assert len(os.listdir("/dev/fd")) < before + 10
        assert sorted(ids_of(kept)) == sorted(list(range(10)) * 100)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("size", [70, 300, 900])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_shuffle_gives_every_row_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, world_size: int, is_whole: bool
) -> None:
    rows = pa.concat_tables(table(300, 300 * number) for number in range(3))
    rows = rows.append_column("many", pa.array([[row] * (row % 5) for row in range(900)]))
    pq.write_table(rows, tmp_path / "0.parquet", row_group_size=size)
    manifest = manifest_of_path(str(tmp_path), "train")
    if not is_whole:
        # Of 900 rows: the groups of a window are read whole, or in pieces.
        monkeypatch.setattr(order, "WINDOW", 128 * manifest.row_size)
    orders = []
    for epoch in range(2):
        seen = []
        for rank in range(world_size):
            shard = shard_of(manifest, rank, world_size)
            shard.set_epoch(epoch)
            for batch in shard.iter_batches(50, shuffle=True):
                assert batch["name"] == [f"n{row}" for row in batch["id"].tolist()]
                assert batch["many"].offsets.diff().tolist() == [row % 5 for row in batch["id"].tolist()]
                seen += batch["id"].tolist()
        assert sorted(seen) == list(range(900))
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_the_size_of_a_parquet_table_is_that_of_its_rows_in_memory(tmp_path: Path, is_dictionary: bool) -> None:
    for count in (20_000, 7):
        names = pa.array([f"{row % 7:0100}" for row in range(count)])
        lists = pa.array([[row % 3] * 4 for row in range(count)], pa.list_(pa.float64()))
        columns = {"name": names, "list": lists, "same": [1.5] * count, "day": ["2026-01-01"] * count}
        rows = pa.table({**columns, "name": names.dictionary_encode() if is_dictionary else names})
        # Of few rows as much is written as they take.
        pq.write_to_dataset(rows, tmp_path / "t", partition_cols=["day"])
    manifest = manifest_of_path(str(tmp_path / "t"), "train")
    # The text, the numbers of the list, the one that is always the same, the day; offsets.
    assert manifest.row_size == pytest.approx(100 + 32 + 8 + 10 + 3 * 4, rel=0.1)
    assert manifest == manifest_of_path(str(tmp_path / "t"), "train"), "nothing in it depends on chance"


def test_a_process_ends_in_the_middle_of_an_epoch_and_with_it_rows_that_no_run_wrote(
    parquet: Path, tmp_path: Path
) -> None:
    program = f"""
import rankzero.train as rt
from rankzero.submit.datasets import manifest_of_path
from rankzero.train import batches, context, data_loader
from rankzero.train.context import TrainContext
from rankzero.train.dataset import DatasetShard
shard = DatasetShard(manifest_of_path({str(parquet)!r}, "train"), TrainContext(), "train")
batches = shard.iter_batches(10, shuffle=True)
next(batches)
print(len(rt.write_rows([{{"x": [1, 2]}}]).to_pandas()))
"""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
    assert os.listdir(temporary) == []


def test_collate_and_drop_last(parquet: Path, tmp_path: Path) -> None:
    shard = shard_of(manifest_of_path(str(parquet), "train"))
    found = list(shard.iter_batches(100, drop_last=True, collate=lambda batch: torch.stack([batch["id"], batch["x"]])))
    assert [batch.shape for batch in found] == [(2, 100)] * 10


def test_a_file_that_was_replaced_is_named(parquet: Path, tmp_path: Path) -> None:
    shard = shard_of(manifest_of_path(str(parquet), "train"))
    pq.write_table(table(7), parquet / "0.parquet")
    for _ in range(2):
        with pytest.raises(ResultError, match=r"0\.parquet has 7 rows where it had 100"):
            list(shard.iter_batches(10))
    os.truncate(parquet / "0.parquet", 200)
    with pytest.raises(ResultError, match=r"0\.parquet of the dataset cannot be read"):
        list(shard.iter_batches(10))
    (parquet / "0.parquet").unlink()
    with pytest.raises(ResultError, match=r"0\.parquet of the dataset does not exist"):
        list(shard.iter_batches(10))


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_rows_that_were_replaced_by_as_many_others_are_not_read(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    root, file = str(tmp_path) if place == "disk" else request.getfixturevalue("bucket"), tmp_path / "written"

    def write(first: int) -> None:
        pq.write_table(table(100, first), file)
        store.write_bytes(f"{root}/rows.parquet", file.read_bytes())

    write(0)
    manifest = manifest_of_path(f"{root}/rows.parquet", "train")
    write(0)
    if place == "disk":
        os.utime(tmp_path / "rows.parquet", (0, 0))
    assert ids_of(shard_of(manifest).iter_batches(10)) == list(range(100)), "a copy has the same rows"
    write(100)
    with pytest.raises(ResultError, match=r"rows\.parquet of the dataset has other rows than when the run"):
        list(shard_of(manifest).iter_batches(10))


def test_bad_arguments_are_named(parquet: Path, tmp_path: Path) -> None:
    shard = shard_of(manifest_of_path(str(parquet), "train"))
    with pytest.raises(InvalidJobError, match="has no column 'y'; it has id, x, name"):
        shard.iter_batches(10, columns=["y"])
    with pytest.raises(InvalidJobError, match="batch_size is 0"):
        shard.iter_batches(0)
    with pytest.raises(InvalidJobError, match="batch_size is True"):
        shard.iter_batches(True)
    with pytest.raises(InvalidJobError, match=r"was given no dataset 'train'"):
        rt.get_dataset_shard()
    shard.load_state_dict({"epoch": 0, "consumed": [[1, 100, 0, 3]], "rows": 7, "seed": 0})
    with pytest.raises(ValueError, match="dataset of 7 rows; this one has 1003"):
        next(iter(shard.iter_batches(100, shuffle=True)))


def test_a_batch_size_may_be_a_number_of_numpy(parquet: Path, tmp_path: Path) -> None:
    shard = shard_of(manifest_of_path(str(parquet), "train"))
    batches = shard.iter_batches(np.int64(500))
    assert len(next(batches)["id"]) == 500
    assert json.loads(json.dumps(shard.state_dict())) == shard.state_dict()
    assert len(list(batches)) == 2


def test_bad_paths_are_refused_before_a_start(parquet: Path, tmp_path: Path) -> None:
    def refusal(source: Any, ranks: int = 1) -> str:
        with pytest.raises(InvalidJobError) as caught:
            Launcher(ranks, dataset=source, store=tmp_path / "runs").run(max, 1, 2)
        return str(caught.value)

    assert "does not exist: /nowhere/x.parquet" in refusal("file:///nowhere/x.parquet")
    (tmp_path / "empty").mkdir()
    assert "has no files" in refusal(tmp_path / "empty")
    pq.write_table(table(0), tmp_path / "zero.parquet")
    assert "has 0 rows" in refusal(tmp_path / "zero.parquet")
    pq.write_table(table(2), tmp_path / "two.parquet")
    assert "has 2 rows for 3 ranks" in refusal(tmp_path / "two.parquet", 3)
    pq.write_table(pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))}), tmp_path / "m.parquet")
    assert "column 'm'" in refusal(tmp_path / "m.parquet")
    assert "needs Spark" in refusal("db.table")
    assert "is of type int; give a Spark DataFrame" in refusal(7)
    assert "cannot name a dataset" in refusal({"a b": parquet})
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    assert "cannot be read from" in refusal(tmp_path / "bad.parquet")
    assert "have Spark read" in refusal(tmp_path / "bad.parquet")
    assert "a pattern is not expanded" in refusal(tmp_path / "*.parquet")
    elsewhere = refusal("hdfs://namenode:8020/table")
    assert "have Spark read" in elsewhere
    assert "\n" not in elsewhere
    in_memory = refusal(pd.DataFrame({"number": [4711]}))
    assert "write other frames as Parquet" in in_memory
    assert "4711" not in in_memory
    assert not (tmp_path / "runs").exists() or not os.listdir(tmp_path / "runs")


def flipped(place: str) -> list[str]:
    """The digests of a table, of the same one written again, and of one with other labels of the same statistics."""
    labels = random.Random(1).choices([0, 1], k=1000)
    filesystem, path = filesystem_of(place)
    found = []
    for column in (labels, labels, [1 - label for label in labels]):
        with filesystem.open_output_stream(f"{path}/part-0.parquet") as file:
            pq.write_table(pa.table({"label": pa.array(column, pa.int32())}), file)
        found.append(manifest_of_path(place, "train").digest)
    return found


def test_other_rows_under_the_same_statistics_are_another_table(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    first, again, other = flipped(str(tmp_path / "table"))
    assert first == again != other
    elsewhere = shutil.copytree(tmp_path / "table", tmp_path / "elsewhere")
    assert manifest_of_path(str(elsewhere), "train").digest == other


def test_an_object_store_is_asked_what_its_files_are(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "digest_of", None)
    first, again, other = flipped(f"{bucket}/table")
    assert first == again != other
    assert manifest_of_path(f"{bucket}/table/part-0.parquet", "train").rows == 1000


@pytest.mark.parametrize("form", ["{}", "file://{}", "file:{}", "~/{.name}", "./{.name}"])
def test_a_path_may_have_spaces(parquet: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    place = parquet.rename(parquet.parent / "my data")
    monkeypatch.chdir(place.parent)
    monkeypatch.setenv("HOME", str(place.parent))
    launcher = Launcher(1, engine=SparkEngine(master="local[1]"), store=place.parent)
    identity_by(launcher.options(dataset=form.format(place)), list, (), {})
    with pytest.raises(InvalidJobError, match="the dataset 'train' does not exist"):
        identity_by(launcher.options(dataset=form.format(place) + ".lost"), list, (), {})
    # A query, whose tables Spark has: nothing is read before the run.
    identity_by(launcher.options(dataset="/* a / b */ SELECT 1"), list, (), {})


def test_timestamps_that_spark_wrote_are_those_of_its_frame(session: Any, tmp_path: Path) -> None:
    texts = ["9999-12-31 23:59:59.123456", "0001-01-03 00:00:00", "1600-02-29 12:00:00", "2024-06-01 00:00:00.000001"]
    values = ", ".join(f"({number}, timestamp'{text} UTC')" for number, text in enumerate(texts))
    frame = session.sql(f"SELECT id, t, unix_micros(t) AS expected FROM VALUES {values} AS rows(id, t)")
    # Spark 3.5 asks for the calendar of years before 1900, and Spark 4 takes this one.
    session.conf.set("spark.sql.parquet.int96RebaseModeInWrite", "CORRECTED")
    frame.coalesce(1).write.option("compression", "none").parquet(str(tmp_path / "table"))
    shard = shard_of(manifest_of_path(str(tmp_path / "table"), "train"))
    (batch,) = shard.iter_batches(4)
    assert batch["t"].tolist() == batch["expected"].tolist() == [row.expected for row in frame.orderBy("id").collect()]


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.timestamp("ms", "UTC"), pa.duration("s")])
def test_a_time_that_has_no_place_in_microseconds_is_an_error_with_its_column(kind: Any, tmp_path: Path) -> None:
    table = pa.table({"t": pa.array([1, 1 << 60]).cast(kind)})
    pq.write_table(table, tmp_path / "t.parquet")
    shard = shard_of(manifest_of_path(str(tmp_path / "t.parquet"), "train"))
    with pytest.raises((InvalidJobError, ResultError), match="column 't'"):
        list(shard.iter_batches(2))


def test_names_of_directories_above_a_table_are_no_columns(tmp_path: Path) -> None:
    folder = tmp_path / "env=prod" / "x=5" / "table"
    (folder / "day=3").mkdir(parents=True)
    pq.write_table(table(10), folder / "day=3" / "0.parquet")
    for place, names in ((folder, ["id", "x", "name", "day"]), (folder / "day=3" / "0.parquet", ["id", "x", "name"])):
        shard = shard_of(manifest_of_path(str(place), "train"))
        assert shard.columns == names
        [batch] = shard.iter_batches(10)
        assert batch["x"].tolist() == [number / 2 for number in range(10)]


def test_a_table_whose_files_lack_columns_is_filled_with_nulls(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    pq.write_table(table(2).select(["id"]), folder / "0.parquet")
    pq.write_table(table(2, 2), folder / "1.parquet")
    pq.write_table(table(2, 4).select(["name", "id"]), folder / "2.parquet")
    [batch] = shard_of(manifest_of_path(str(folder), "train")).iter_batches(10)
    assert batch["id"].tolist() == list(range(6))
    assert batch["x"].isnan().tolist() == [True, True, False, False, True, True]
    assert batch["name"] == [None, None, "n2", "n3", "n4", "n5"]


def test_files_that_do_not_fit_together_are_refused_before_a_start(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "0.parquet")
    for other in (["1"], [0.5], pa.array([1], pa.int32())):
        pq.write_table(pa.table({"a": other}), tmp_path / "1.parquet")
        with pytest.raises(InvalidJobError, match=r"columns of different types .*: rewrite the table"):
            manifest_of_path(str(tmp_path), "train")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "1.parquet")
    with pytest.raises(InvalidJobError, match=r"'b' of the dataset 'train' \(int64\) is not in .*0\.parquet"):
        manifest_of_path(str(tmp_path), "train")


def count_rows() -> list[int]:
    shard, checked = rt.get_dataset_shard(), rt.get_dataset_shard("eval")
    seen = ids_of(shard.iter_batches(64, shuffle=True))
    every = [number for part in rt.all_gather_object(seen) for number in part]
    assert len(every) == len(set(every))
    return [len(every), len(seen), len(checked), checked.num_rows]


def test_the_ranks_of_a_run_read_a_path(parquet: Path, tmp_path: Path) -> None:
    launcher = Launcher(2, dataset={"train": parquet, "eval": str(parquet / "0.parquet")}, store=tmp_path / "runs")
    assert launcher.run(count_rows) == [1003, 501, 250, 500]
