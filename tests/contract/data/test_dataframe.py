"""A Spark DataFrame, a table or a query, computed once and read by the ranks."""

import glob
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import until
from tests.contract.test_secrets import SECRET, files_with_the_secret

import rankzero.train as rt
from rankzero import EngineError, InvalidJobError, Launcher, SparkEngine
from rankzero.data.manifest import Manifest
from rankzero.engines.spark import materialize as materializing
from rankzero.engines.spark.materialize import content_of, materialize, row_hash
from rankzero.train import DatasetShard, TrainContext


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """1001 rows in seven partitions, one of them empty, of all kinds of columns."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    number = F.col("id")
    return (
        session.range(0, 1200, 1, 6)
        .where("id < 1001")
        .select(
            "id",
            (number / 2).cast("float").alias("x"),
            (number % 3).cast("decimal(9,2)").alias("amount"),
            F.array(number, number + 1).alias("pair"),
            F.when(number % 2 == 0, F.array(number)).otherwise(F.array()).alias("some"),
            array_to_vector(F.array(number.cast("double"), F.lit(1.0))).alias("vector"),
            F.when(number != 7, number.cast("string")).alias("text"),
            F.struct(number.alias("inner")).alias("nested"),
            F.timestamp_seconds(number).alias("time"),
        )
    )


def say(_: str) -> None:
    pass


def shard_of(manifest: Any, rank: int = 0, world_size: int = 1) -> DatasetShard:
    return DatasetShard(manifest, TrainContext(rank=rank, world_size=world_size), "train")


def test_every_kind_of_column_arrives_in_the_order_of_the_frame(frame: Any, tmp_path: Path) -> None:
    manifest = materialize(frame, str(tmp_path / "rows"), "train", say)
    assert manifest.lengths == {"pair": 2, "vector": 2}
    shard = shard_of(manifest)
    [batch] = shard.iter_batches(2000)
    numbers = list(range(1001))
    assert batch["id"].tolist() == numbers
    assert batch["x"].tolist() == [number / 2 for number in numbers]
    assert batch["amount"].tolist() == [number % 3 for number in numbers]
    assert batch["pair"].tolist() == [[number, number + 1] for number in numbers]
    assert batch["vector"].tolist() == [[number, 1] for number in numbers]
    assert batch["some"].values.tolist() == numbers[::2]
    assert batch["text"][6:9] == ["6", None, "8"]
    assert batch["nested"]["inner"].tolist() == numbers
    assert batch["time"][1] == 1_000_000


@pytest.mark.parametrize("as_argument", [True, False])
def test_a_frame_that_a_function_is_given_or_uses_is_refused(frame: Any, launcher: Launcher, as_argument: bool) -> None:
    with pytest.raises(InvalidJobError, match="cannot be pickled"):
        launcher.run(lambda rows: rows, frame) if as_argument else launcher.run(lambda: frame.count())


def test_the_content_decides_and_not_the_partitions(frame: Any, session: Any, tmp_path: Path) -> None:
    other = frame.repartition(3)
    assert content_of(frame) == content_of(other) == materialize(other, str(tmp_path / "rows"), "train", say).digest
    assert content_of(frame.where("id != 5")) != content_of(frame)
    first = session.createDataFrame([(None, 1), (1, None)], "a int, b int")
    second = session.createDataFrame([(1, None), (1, None)], "a int, b int")
    assert content_of(first) != content_of(second)


def test_rows_of_other_content_have_other_checksums(session: Any) -> None:
    """Where arrays end and where nulls are, at every depth, is a part of the content."""
    from pyspark.ml.linalg import Vectors

    empty, one, sparse = Vectors.dense([]), Vectors.dense([5.0]), Vectors.sparse(3, [1], [5.0])
    schema = "query array<int>, doc array<int>, place struct<x:int,y:int,all:array<double>>"
    rows = [
        ([1, 2], [3], (1, 1, [])),
        ([1], [2, 3], (1, 1, [])),
        ([], [1, 2, 3], (1, 1, [])),
        (None, [1, 2, 3], (1, 1, [])),
        ([1, None], [2, 3], (1, 1, [])),
        ([None, 1], [2, 3], (1, 1, [])),
        ([1], [2, 3], (1, None, [])),
        ([1], [2, 3], (None, 1, [])),
        ([1], [2, 3], (None, None, [1.0, None])),
        ([1], [2, 3], (None, None, [None, 1.0])),
        ([1], [2, 3], (None, None, None)),
        ([1], [2, 3], None),
    ]
    vectors = [(empty, one), (one, empty), (sparse, one), (one, sparse), (None, one), (one, None)]
    for frame, count in (
        (session.createDataFrame(rows, schema), len(rows)),
        (session.createDataFrame(vectors, ["v", "w"]), len(vectors)),
    ):
        assert frame.select(row_hash(frame)).distinct().count() == count


def test_a_line_says_how_far_spark_is_whenever_the_interval_is_over(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks, done = itertools.count(0, 7), itertools.count(1), threading.Event()
    monkeypatch.setattr(materializing, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    lines: list[str] = []
    materializing.action(
        lambda: done.wait(60),
        session.range(1),
        "the dataset",
        lines.append,
        lambda: done.set() if next(looks) == 6 else None,
    )
    assert [line.rpartition(", ")[2] for line in lines[:2]] == ["14 s", "28 s"]


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ("map('a', id)", "column 'bad' of the dataset 'train' is map"),
        ("array('a')", "arrays of string cannot become a tensor"),
        ("if(id = 3, null, id)", r"column 'bad' .* has 1 nulls"),
        ("make_ym_interval(1)", "column 'bad' of the dataset 'train' is interval"),
        ("named_struct('x', if(id = 3, null, id))", r"column 'bad.x' .* has 1 nulls"),
        ("array(1, if(id < 2, null, id))", r"column 'bad\[\]' .* has 2 nulls"),
        ("parse_json('1')", "column 'bad' of the dataset 'train' is variant"),
        ("named_struct('x', array(parse_json('1')))", "column 'bad' of the dataset 'train' is struct"),
    ],
)
def test_a_column_without_a_tensor_is_refused(session: Any, tmp_path: Path, column: str, why: str) -> None:
    if "parse_json" in column and session.version < "4":
        pytest.skip("Spark 4 is the first with variants")
    frame = session.range(10).selectExpr("id", f"{column} AS bad")
    with pytest.raises(InvalidJobError, match=why):
        Launcher(2, dataset=frame, store=tmp_path).run(max, 1, 2)
    assert glob.glob(f"{tmp_path}/*/submissions/*/datasets/*") == []


def test_vectors_of_several_lengths_are_refused_by_name(session: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    frame = session.createDataFrame([(Vectors.dense([1.0]),), (Vectors.sparse(3, {}),)], ["v"])
    with pytest.raises(InvalidJobError, match="column 'v' of the dataset 'train' has vectors of 1 to 3 numbers"):
        Launcher(2, dataset=frame, store=tmp_path).run(max, 1, 2)


def test_any_name_of_a_column_is_read(session: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    names = ["a", "A", "a.b", "back`tick", "two words", "c0"]
    frame = session.range(4).selectExpr(*(f"id + {number} AS n{number}" for number in range(len(names)))).toDF(*names)
    nested = frame.withColumn("s", F.expr("named_struct('x', 1, 'X', 2)"))
    manifest = materialize(nested, str(tmp_path / "rows"), "train", say)
    (batch,) = shard_of(manifest).iter_batches(4)
    assert {name: batch[name].tolist() for name in names} == {
        name: [number + row for row in range(4)] for number, name in enumerate(names)
    }
    assert {name: set(column.tolist()) for name, column in batch["s"].items()} == {"x": {1}, "X": {2}}
    assert manifest.digest == content_of(nested)


def test_bad_frames_are_refused_and_leave_nothing(session: Any, tmp_path: Path) -> None:
    def refusal(frame: Any, kind: type[Exception] = InvalidJobError) -> str:
        with pytest.raises(kind) as caught:
            Launcher(3, engine=SparkEngine(session=session), dataset=frame, store=tmp_path).run(max, 1, 2)
        return str(caught.value)

    assert "has no rows" in refusal(session.range(0))
    assert "has 2 rows for 3 ranks" in refusal(session.range(2))
    assert "TABLE_OR_VIEW_NOT_FOUND" in refusal("no.such")
    assert "cannot be read by Spark" in refusal("SELECT nothing FROM nowhere")
    failing = session.range(10).selectExpr("if(id = 9, raise_error('nine'), id) AS id")
    assert "Spark could not compute the dataset 'train'" in refusal(failing, EngineError)
    assert glob.glob(f"{tmp_path}/*/submissions/*/datasets/*") == []


def ids() -> list[int]:
    mine = [
        number for batch in rt.get_dataset_shard().iter_batches(64, shuffle=True) for number in batch["id"].tolist()
    ]
    return sorted(number for part in rt.all_gather_object(mine) for number in part)


def test_the_ranks_of_a_barrier_stage_read_the_frame(session: Any, frame: Any, tmp_path: Path) -> None:
    launcher = Launcher(2, engine=SparkEngine(session=session), store=tmp_path)
    assert launcher.options(dataset=frame).run(ids) == list(range(1001))
    frame.createOrReplaceTempView("rows_of_the_test")
    query = "SELECT id FROM rows_of_the_test WHERE id < 100"
    assert launcher.options(dataset=query).run(ids) == list(range(100))


def first_or_fail() -> list[int]:
    shard = rt.get_dataset_shard()
    if checkpoint := rt.get_checkpoint():
        shard.load_state_dict(checkpoint.load()["shard"])
        mine = [number for batch in shard.iter_batches(50) for number in batch["id"].tolist()]
        return sorted(number for part in rt.all_gather_object(mine) for number in part)
    for number, _ in enumerate(shard.iter_batches(50)):
        if number == 3:
            rt.report({}, checkpoint={"shard": shard.state_dict()})
            rt.barrier()
            if rt.get_context().rank == 0:
                # A peer of a rank that fails is stopped, perhaps before it has written what it reported.
                raise RuntimeError("no more")
    return []


def test_a_resumed_run_goes_on_in_the_rows_with_which_it_began(session: Any, frame: Any, tmp_path: Path) -> None:
    """The same content in other partitions: the first order counts. After success no rows are left."""
    # With time for the write of what was reported right before the failure.
    launcher = Launcher(2, store=tmp_path, run_id="again", code_version="1", stop_grace=60)
    with pytest.raises(Exception, match="no more"):
        launcher.options(dataset=frame).run(first_or_fail)
    assert len(glob.glob(f"{tmp_path}/again/submissions/*/datasets/*")) == 1
    rest = launcher.options(dataset=frame.repartition(2)).run(first_or_fail)
    assert rest == [*range(200, 500), *range(700, 1001)]
    assert glob.glob(f"{tmp_path}/again/submissions/*/datasets/*") == []
    assert launcher.options(dataset=frame.where("id < 100")).run(lambda: rt.get_dataset_shard().num_rows) == 100
    assert glob.glob(f"{tmp_path}/again/submissions/*/datasets/*") == []


@pytest.mark.soak
def test_a_resumed_run_keeps_the_rows_of_its_query(session: Any, tmp_path: Path) -> None:
    """Its table has grown meanwhile, and the driver of the second submission has a Spark of its own."""
    source = str(tmp_path / "source")
    session.range(0, 1001, 1, 3).write.parquet(source)
    engine = SparkEngine(master="local[2]")
    query = f"SELECT id FROM parquet.`{source}` ORDER BY id"
    launcher = Launcher(2, engine=engine, dataset=query, store=tmp_path, run_id="q", stop_grace=60)
    with pytest.raises(Exception, match="no more"):
        launcher.run(first_or_fail)
    assert len(glob.glob(f"{tmp_path}/q/submissions/*/datasets/*")) == 1
    session.range(1001, 1500, 1, 1).write.mode("append").parquet(source)
    assert launcher.run(first_or_fail) == [*range(200, 500), *range(700, 1001)]
    assert glob.glob(f"{tmp_path}/q/submissions/*/datasets/*") == []


class Interrupted(BaseException):
    pass


def test_an_interrupt_while_spark_computes_leaves_nothing(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    # The first python3 of the path may have no pyarrow, without which the function fails before the interrupt.
    monkeypatch.setattr(session.sparkContext, "pythonExec", sys.executable)

    @F.udf("long")  # type: ignore[untyped-decorator,unused-ignore]
    def forever(number: int) -> int:
        import time

        time.sleep(600)
        return number

    calls = iter(range(20))

    def check() -> None:
        if next(calls) == 15:
            raise Interrupted

    frame = session.range(10).select(forever("id").alias("id"))
    with pytest.raises(Interrupted):
        materialize(frame, str(tmp_path / "rows"), "train", say, check)
    assert not (tmp_path / "rows").exists()
    tracker = session.sparkContext.statusTracker()
    until(lambda: not tracker.getActiveStageIds(), 60, "the end of Spark's stage")
    until(lambda: "rankzero-data" not in {thread.name for thread in threading.enumerate()}, 30, "the end of the thread")


def test_what_spark_begins_after_the_interrupt_ends_as_well(session: Any) -> None:
    interrupted = threading.Event()

    def begin_late() -> None:
        # Planning a query takes its time.
        interrupted.wait(30)
        time.sleep(0.5)
        session.sparkContext.parallelize(range(2), 2).foreach(lambda _: time.sleep(600))

    def check() -> None:
        interrupted.set()
        raise Interrupted

    with pytest.raises(Interrupted):
        materializing.action(begin_late, session.range(1), "it", say, check)
    until(lambda: "rankzero-data" not in {thread.name for thread in threading.enumerate()}, 30, "the end of the thread")
    tracker = session.sparkContext.statusTracker()
    # Which hears of the end a little later than the thread.
    until(lambda: not tracker.getActiveStageIds(), 60, "the end of Spark's stage")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the datasets that Spark was asked to compute and write."""
    names: list[str] = []

    def note(frame: Any, folder: str, name: str, *rest: Any) -> Manifest:
        names.append(name)
        return materialize(frame, folder, name, *rest)

    monkeypatch.setattr("rankzero.engines.spark.materialize.materialize", note)
    return names


def _fail_or_count(number: int, folder: str) -> int:
    rows = rt.get_dataset_shard().num_rows
    if number == 1 and not Path(folder, "go").exists():
        raise RuntimeError("no more")
    return rows + number


def test_spark_writes_nothing_for_a_training_that_resumes(session: Any, tmp_path: Path, written: list[str]) -> None:
    launcher = Launcher(1, store=tmp_path / "runs", run_id="r", dataset=session.range(100))
    with pytest.raises(Exception, match="no more"):
        launcher.run(_fail_or_count, 1, str(tmp_path))
    (tmp_path / "go").touch()
    assert launcher.run(_fail_or_count, 1, str(tmp_path)) == 101
    assert written == ["train"]


def both() -> list[Any]:
    return [ids(), rt.get_dataset_shard("eval").columns]


@pytest.mark.soak
def test_a_driver_with_a_spark_of_its_own_computes_queries_and_writes_no_secret_setting(tmp_path: Path) -> None:
    engine = SparkEngine(master="local[2]", conf={"spark.hadoop.fs.s3a.secret.key": SECRET})
    dataset = {"train": "SELECT id FROM range(500)", "eval": "SELECT id, id * 2 AS y FROM range(0, 30, 1, 3)"}
    handle = Launcher(2, engine=engine, dataset=dataset, store=tmp_path / "store", run_id="q").submit(both)
    assert handle.result(120) == [list(range(500)), ["id", "y"]]
    assert os.listdir(handle.own.path("datasets")) == []
    assert files_with_the_secret(tmp_path / "store") == []


@pytest.mark.soak
def test_a_table_that_its_driver_does_not_find_ends_the_run_with_a_typed_error(tmp_path: Path) -> None:
    launcher = Launcher(2, engine=SparkEngine(master="local[2]"), dataset="no.such", store=tmp_path, max_restarts=3)
    with pytest.raises(InvalidJobError, match="TABLE_OR_VIEW_NOT_FOUND"):
        launcher.run(ids)
    assert glob.glob(f"{tmp_path}/*/submissions/*/datasets/*") == []
