"""Which rows a submission finds that its run had computed before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.runs import submitted

from rankzero import store
from rankzero.data.manifest import FILE, File, Manifest, encode_schema, from_bytes, to_bytes
from rankzero.driver.places import compute_tables
from rankzero.run.directory import Submission


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


def read(own: Submission, session: Any, known: dict[str, Manifest] | None = None) -> dict[str, Manifest]:
    """What the ranks of this submission would find."""
    job = own.job
    if known:
        store.write_bytes(own.path(FILE), to_bytes(known))
        job = replace(job, files={FILE: {"location": own.path(FILE)}})
    done = compute_tables(own, job, session, print, lambda: None)
    return from_bytes(store.read_bytes(done.files[FILE]["location"]))


def submit(directory: Path, *before: Submission, **facts: Any) -> Submission:
    names = [own.name for own in before]
    facts = {"submission": len(names), "first_attempt": len(names), "queries": {"train": "db.events"}} | facts
    return submitted(str(directory), earlier=names, **facts)


def test_a_submission_whose_driver_died_early_does_not_hide_the_rows_of_those_before(tmp_path: Path) -> None:
    first, session = submit(tmp_path / "r"), Session()
    frame = {"eval": made(first.new_dataset("eval"), "frame")}
    before = read(first, session, frame)
    # It died before it had looked for the query.
    second = submit(tmp_path / "r", first)
    store.write_bytes(second.path(FILE), to_bytes(frame))
    assert read(submit(tmp_path / "r", first, second), session, frame) == before
    assert session.asked == 1


def test_another_training_under_the_same_id_gets_its_own_rows(tmp_path: Path) -> None:
    session = Session()
    read(submit(tmp_path / "r"), session)
    # It died before it had computed anything, and was submitted again.
    fresh = submit(tmp_path / "r", submission=1, queries={"train": "db.others"})
    found = read(submit(tmp_path / "r", fresh, submission=2, queries={"train": "db.others"}), session)
    assert found["train"].digest == "db.others 2"
