"""Which rows a submission finds that its run had computed before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankzero import LocalEngine, store
from rankzero.data.manifest import FILE, File, Manifest, encode_schema, from_bytes, to_bytes
from rankzero.driver.tables import Tables
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.submit.datasets import collect, of_earlier_try

JOB = Job(
    run_id="r",
    name="train",
    num_processes=1,
    processes_per_task=1,
    use_gpu=False,
    backend=None,
    timeout=None,
    start_timeout=60,
    engine={},
    queries={"train": "db.events"},
)


class Session:
    """What computes tables: one row that says how often it was asked."""

    asked = 0

    def read_table(self, query: str, folder: str, *_: Any) -> Manifest:
        self.asked += 1
        return made(folder, f"{query} {self.asked}")


def made(folder: str, digest: str) -> Manifest:
    batch = pa.record_batch({"id": [1]})
    store.make_directory(folder)
    pq.write_table(pa.Table.from_batches([batch]), f"{folder}/part-0.parquet")
    return Manifest(encode_schema(batch.schema), (File(f"{folder}/part-0.parquet", (1,)),), 8, digest, {}, folder)


def read(run: RunDirectory, job: Job, session: Any, known: dict[str, Manifest] | None = None) -> dict[str, Manifest]:
    """What the ranks of this submission would find."""
    submit(run, job, known)
    return drive(run, job, session, known)


def drive(run: RunDirectory, job: Job, session: Any, known: dict[str, Manifest] | None = None) -> dict[str, Manifest]:
    """What they find by one of its drivers."""
    if known:
        location = run.submission_path(job.submission, FILE)
        job = replace(job, files={FILE: {"location": location}})
    done = Tables(run, job, session).read(print)
    return from_bytes(store.read_bytes(done.files[FILE]["location"]))


def submit(run: RunDirectory, job: Job, known: dict[str, Manifest] | None = None) -> None:
    assert run.claim(job.submission)
    run.write_files(job.submission, {FILE: [to_bytes(known)]} if known else {})
    run.write_submission(job)


def test_a_submission_whose_driver_died_early_does_not_hide_the_rows_of_those_before(tmp_path: Path) -> None:
    run, session = RunDirectory(str(tmp_path / "r")), Session()
    frame = made(run.new_dataset("eval"), "frame")
    before = read(run, JOB, session, {"eval": frame})
    # It died before it had looked for the query.
    submit(run, replace(JOB, submission=1, first_attempt=1), {"eval": frame})
    assert read(run, replace(JOB, submission=2, first_attempt=2), session, {"eval": frame}) == before
    assert session.asked == 1


def test_what_a_driver_had_begun_to_compute_when_it_died_goes(tmp_path: Path) -> None:
    run, session = RunDirectory(str(tmp_path / "r")), Session()
    frame = made(run.new_dataset("eval"), "frame")
    submit(run, JOB, {"eval": frame})
    # It is killed here. Another submitter is at work already.
    store.make_directory(run.new_dataset("train", 0))
    coming = run.new_dataset("eval")
    store.make_directory(coming)
    found = read(run, replace(JOB, submission=1, first_attempt=1), session, {"eval": frame})
    folders = {run.path("datasets", name) for name in store.list_names(run.path("datasets"))}
    assert folders == {frame.folder, found["train"].folder, coming}


def test_another_training_under_the_same_id_gets_its_own_rows(tmp_path: Path) -> None:
    run, session = RunDirectory(str(tmp_path / "r")), Session()
    before = read(run, JOB, session)
    fresh = replace(JOB, submission=1, first_attempt=1, fresh_since=1, queries={"train": "db.others"})
    # It died before it had computed anything, and was submitted again.
    submit(run, fresh)
    found = read(run, replace(fresh, submission=2, first_attempt=2), session)
    assert found["train"].digest == "db.others 2"
    assert not store.exists(str(before["train"].folder))


def test_a_driver_that_takes_a_lost_ones_place_finds_the_rows_of_that_one(tmp_path: Path) -> None:
    run, session = RunDirectory(str(tmp_path / "r")), Session()
    frame = made(run.new_dataset("eval"), "frame")
    before = read(run, JOB, session, {"eval": frame})
    assert drive(run, JOB, session, {"eval": frame}) == before
    assert session.asked == 1


def test_rows_stay_for_a_submitter_that_knows_the_store_by_another_path(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    session = Session()
    before = read(RunDirectory(str(tmp_path / "store" / "r")), JOB, session)
    found = read(RunDirectory(str(tmp_path / "link" / "r")), replace(JOB, submission=1, first_attempt=1), session)
    assert found == before
    assert store.exists(found["train"].files[0].location)


def test_a_try_keeps_the_datasets_of_the_try_before_except_queries(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    eval_rows = replace(made(run.new_dataset("eval"), "rows"), source="a/path")
    read(run, replace(JOB, generation="scheduled"), Session(), {"eval": eval_rows})
    sources = {"train": "db.events", "eval": "a/path"}
    assert of_earlier_try(run, sources, "scheduled") == {"eval": eval_rows}
    assert of_earlier_try(run, {**sources, "eval": "another/path"}, "scheduled") == {}
    assert of_earlier_try(run, sources, "cleared") == {}


class Frame:
    """What counts as a DataFrame of Spark."""

    __module__ = "pyspark.sql.frame"
    mapInArrow = None


@pytest.mark.parametrize("is_removed", [False, True])
def test_rows_that_the_run_removes_while_they_are_compared_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    before = made(run.new_dataset("train"), "rows")

    def content_of(frame: object) -> str:
        if is_removed:
            store.remove(str(before.folder))
        return "rows"

    monkeypatch.setattr("rankzero.engines.spark.materialize.content_of", content_of)
    monkeypatch.setattr("rankzero.engines.spark.materialize.materialize", lambda _, folder, *more: made(folder, "rows"))
    found = collect({"train": Frame()}, LocalEngine(), run, 1, {"train": before}).manifests["train"]
    assert (found.folder != before.folder) == is_removed
    assert store.exists(found.files[0].location)
