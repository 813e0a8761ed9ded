"""Which run directories a collection removes, which it leaves, and what its death or a submission does to it."""

import shutil
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.runs import job, submitted

from rankzero import InvalidJobError, RunHandle, RunNotFoundError, store
from rankzero.data.manifest import FILE, Manifest, to_bytes
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.retention import ABANDONED, HALF_REMOVED, REMOVAL_CLAIM_TIMEOUT, collect
from rankzero.run.status import RunStatus
from rankzero.submit.existing import claim

DAY = 86400.0
MONTH = 30 * DAY
NOW = time.time()
OLD = NOW - MONTH - DAY
YOUNG = NOW - MONTH + DAY


@pytest.fixture(params=["local", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "runs")
    fsspec.filesystem("memory").rm("/bucket", recursive=True) if fsspec.filesystem("memory").exists("/bucket") else None
    return "memory://bucket/runs"


def make_run(root: str, run_id: str, status: RunStatus, **facts: Any) -> Submission:
    """A run directory as a submission and a driver leave it."""
    own = submitted(store.join(root, run_id), status, **facts)
    store.write_bytes(own.path("payload.pkl"), b"p" * 1000)
    store.write_bytes(own.path("lines"), b"l" * 100)
    store.make_directory(own.path("checkpoints", "0000-000000"))
    store.write_bytes(own.path("checkpoints", "0000-000000", "checkpoint.json"), b"{}")
    return own


def begin(root: str, run_id: str, **facts: Any) -> Submission:
    """A directory whose submitter died before its claim."""
    own = Submission(RunDirectory(store.join(root, run_id)), job(run_id=run_id, **facts))
    own.write_files({"payload.pkl": [b"p"]})
    return own


def ended(at: float, state: str = "succeeded") -> RunStatus:
    return RunStatus(state=state, heartbeat=at, ended=at)


def names(root: str) -> list[str]:
    """What lies in the store; object stores have no empty directories, though the one in memory does."""
    return [name for name in store.list_names(root) if "." in name or store.list_files(store.join(root, name))]


def test_what_was_begun_in_this_hour_stays(root: str) -> None:
    begin(root, "begun")
    assert collect(root, 1.0, now=NOW + 600).removed == []
    assert collect(root + "/nowhere", MONTH).removed == []


def test_only_old_runs_that_ended_are_removed(root: str) -> None:
    for state in ("succeeded", "failed", "cancelled"):
        make_run(root, f"old-{state}", ended(OLD, state))
    make_run(root, "young", ended(YOUNG))
    # Its driver died: nobody has written for a month.
    make_run(root, "dead", RunStatus(state="running", heartbeat=OLD, driver_host="elsewhere", driver_pid=1))
    make_run(root, "dead-lately", RunStatus(state="running", heartbeat=YOUNG, driver_host="elsewhere", driver_pid=1))
    make_run(root, "live", RunStatus(state="running", heartbeat=time.time(), driver_host="elsewhere", driver_pid=1))
    store.write_bytes(make_run(root, "emptied", RunStatus(state="running")).path("status.json"), b"")
    store.make_directory(store.join(root, "digits-data"))
    store.write_bytes(store.join(root, "digits-data", "a.torch"), b"data")
    store.write_bytes(store.join(root, "notes.txt"), b"mine")
    # Folders of others with names that rankzero uses, too.
    for path in (
        "huggingface/token",
        "huggingface/datasets/squad/1/x",
        "project/datasets/train/part-0",
        "project/a",
    ):
        location = store.join(root, *path.split("/"))
        store.make_directory(location.rpartition("/")[0])
        store.write_bytes(location, b"hf_mine")
    # A secret of as many digits as rankzero's tokens, and a directory of rankzero to which a user has added a file.
    for path, text in (("service/token", "0a" * 16), ("service/thesis.txt", "mine"), ("half-run/notes.txt", "mine")):
        location = store.join(root, *path.split("/"))
        store.make_directory(location.rpartition("/")[0])
        store.write_bytes(location, text.encode())
    begin(root, "half-run")
    others = ["digits-data", "huggingface", "notes.txt", "project", "service", "half-run", "emptied"]

    would = collect(root, MONTH, dry_run=True)
    assert len(names(root)) == 14, "a dry run removes nothing"
    done = collect(root, MONTH)

    gone = ["dead", "old-cancelled", "old-failed", "old-succeeded"]
    assert [removed.directory.rsplit("/", 1)[-1] for removed in done.removed] == gone
    assert [removed.state for removed in done.removed] == ["failed", "cancelled", "failed", "succeeded"]
    assert done == would
    assert done.kept == 4
    assert done.problems == {}
    assert [name for name in names(root) if name not in gone] == sorted(["dead-lately", "live", "young", *others])
    assert [RunDirectory(store.join(root, name)).names() for name in gone] == [["1.json"]] * 4
    collect(root, MONTH, now=NOW + 2 * REMOVAL_CLAIM_TIMEOUT)
    assert names(root) == sorted(["dead-lately", "live", "young", *others])
    assert collect(root, MONTH).removed == []
    for name in ("service", "half-run"):
        # Long after the last file was written.
        assert store.join(root, name) not in [
            removed.directory for removed in collect(root, MONTH, dry_run=True, now=NOW + 3 * MONTH).removed
        ]


@pytest.mark.parametrize("removed_before", [False, True])
def test_a_directory_in_which_a_submission_was_only_begun_goes_when_it_is_old(root: str, removed_before: bool) -> None:
    if removed_before:
        make_run(root, "abandoned", ended(OLD))
        collect(root, MONTH)
    own = begin(root, "abandoned", submission=2 * removed_before)
    folder = own.new_dataset("train")
    store.make_directory(folder)
    store.write_bytes(store.join(folder, "_token"), b"x")
    young = collect(root, MONTH)
    assert (young.removed, young.kept) == ([], 1)
    (removed,) = collect(root, MONTH, now=NOW + MONTH + DAY).removed
    assert removed.state == ABANDONED
    assert own.run.names() == [f"{2 * removed_before}.json"]
    collect(root, MONTH, now=NOW + 2 * MONTH)
    assert names(root) == []


def test_garbage_of_a_submitter_that_lost_its_number_goes(root: str) -> None:
    run = make_run(root, "one", ended(YOUNG)).run
    lost, next_one = begin(root, "one"), Submission(run, job(submission=1))
    next_one.write_files({"payload.pkl": [b"p"]})
    collect(root, MONTH)
    assert lost.name not in run.names()
    assert next_one.name in run.names(), "it may be being written"


def test_a_replaced_submission_whose_rows_nobody_reads_goes_and_its_handle_finds_no_run(root: str) -> None:
    first = make_run(root, "one", ended(OLD, "failed"))
    computed = make_run(root, "one", ended(OLD), submission=1)
    last = make_run(root, "one", ended(YOUNG), submission=2, files={FILE: {}})
    # A training from scratch whose rows are those of the one before reads them where they are.
    rows = Manifest("", (), 0, "digest", folder=computed.new_dataset("train"))
    store.write_bytes(last.path(FILE), to_bytes({"train": rows}))
    handle = RunHandle[Any](first.run.directory, job=first.job)
    assert handle.status().state == "failed"
    assert [removed.directory for removed in collect(root, MONTH).removed] == [first.directory]
    with pytest.raises(RunNotFoundError, match="was removed"):
        handle.status()


def test_a_driver_that_comes_back_finds_the_end(root: str) -> None:
    own = make_run(root, "dead", RunStatus(state="running", heartbeat=OLD, driver_host="elsewhere", driver_pid=1))
    assert own.claim_driver()
    collect(root, MONTH)
    assert own.is_lost()
    with pytest.raises(FileNotFoundError):
        own.finish(ended(NOW))
    assert own.run.newest()[1] is None


def test_one_unreadable_directory_stops_no_other(root: str) -> None:
    make_run(root, "a", ended(OLD))
    other = make_run(root, "b", ended(OLD))
    store.write_bytes(other.path("status.json"), b'{"state": "succeeded"}')
    strange = make_run(root, "c", ended(OLD))
    store.write_bytes(strange.run.job_path(0), b'{"from": "the future"}')
    # By a power failure, which leaves the end.
    store.write_bytes(make_run(root, "d", ended(OLD)).path("status.json"), b'{"state": "succ')

    done = collect(root, MONTH)
    assert [removed.directory for removed in done.removed] == [store.join(root, "a"), store.join(root, "d")]
    assert sorted(done.problems) == [other.run.directory, strange.run.directory]
    assert "this version of rankzero reads format" in done.problems[strange.run.directory]
    collect(root, MONTH, now=NOW + 2 * REMOVAL_CLAIM_TIMEOUT)
    assert names(root) == ["b", "c"]


@pytest.mark.parametrize("moment", ["claim_removal", "newest", "numbers"])
def test_a_run_that_another_collector_removes_meanwhile_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    root = str(tmp_path)
    make_run(root, "a", ended(OLD))
    method = getattr(RunDirectory, moment)

    def late(run: RunDirectory, *arguments: Any) -> Any:
        shutil.rmtree(run.directory, ignore_errors=True)
        return method(run, *arguments)

    monkeypatch.setattr(RunDirectory, moment, late)
    done = collect(root, MONTH)
    assert (done.removed, done.problems) == ([], {})
    assert names(root) == []


@pytest.mark.parametrize("older_than", [0, -1.0, "30d"])
def test_an_age_that_is_none_is_refused(root: str, older_than: object) -> None:
    with pytest.raises(InvalidJobError, match="older_than is"):
        collect(root, older_than)  # type: ignore[arg-type]


def test_links_are_left_alone(tmp_path: Path) -> None:
    elsewhere = make_run(str(tmp_path / "elsewhere"), "old", ended(OLD))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(elsewhere.run.directory)
    assert collect(tmp_path / "runs", MONTH).removed == []
    assert elsewhere.status().state == "succeeded"


def test_a_submission_of_the_same_run_id_while_the_old_run_is_removed(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, payload = make_run(root, "same", ended(OLD, "failed")).run, {"payload.pkl": [b"new"]}
    early, late = (Submission(run, job(run_id="same", submission=number)) for number in (1, 2))
    early.write_files(payload)
    remove = store.remove

    def submit(location: str) -> None:
        monkeypatch.undo()
        # One has looked before, and one after the removal began.
        assert not claim(early, payload)
        assert claim(late, payload)
        remove(location)

    monkeypatch.setattr(store, "remove", submit)
    assert len(collect(root, MONTH).removed) == 1
    assert run.job().nonce == late.job.nonce
    assert store.read_bytes(late.path("payload.pkl")) == b"new"
    assert sorted(run.names()) == sorted(["1.json", "2.json", late.name])


def test_a_submission_that_was_faster_keeps_its_run(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_run(root, "same", ended(OLD, "failed"))
    removal = RunDirectory.claim_removal

    def overtaken(self: RunDirectory, number: int) -> bool:
        assert claim(Submission(self, job(run_id="same", submission=number, earlier=[own.name])), {})
        return removal(self, number)

    monkeypatch.setattr(RunDirectory, "claim_removal", overtaken)
    done = collect(root, MONTH)
    assert (done.removed, done.kept) == ([], 1)
    assert own.status().state == "failed"


def test_what_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(str(tmp_path), "old", ended(OLD)).run
    with monkeypatch.context() as patch:
        # As `store.remove` does where files belong to somebody else.
        patch.setattr(store, "remove", lambda location: None)
        done = collect(tmp_path, MONTH)
    assert done.removed == []
    assert "cannot be removed entirely" in done.problems[run.directory]
    assert [removed.state for removed in collect(tmp_path, MONTH).removed] == [HALF_REMOVED]
    assert run.names() == ["1.json"]
