"""Which run directories a collection removes, which it leaves, and what its death or a submission does to it."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rankzero import InvalidJobError, store
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.run.identity import Asked, Identity
from rankzero.run.retention import ABANDONED, HALF_REMOVED, HIDDEN, REMOVAL_CLAIM_TIMEOUT, Age, collect, is_due
from rankzero.run.status import RunStatus
from rankzero.submit.submission import submit

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


def make_job(run_id: str, submission: int = 0) -> Job:
    return Job(
        run_id=run_id,
        name="train",
        num_processes=2,
        processes_per_task=1,
        use_gpu=False,
        backend="gloo",
        timeout=None,
        start_timeout=60.0,
        engine={"kind": "local"},
        submission=submission,
    )


def make_run(root: str, run_id: str, status: RunStatus) -> RunDirectory:
    """A run directory as a submission and a driver leave it."""
    run = RunDirectory(store.join(root, run_id))
    assert run.claim(0)
    run.write_files(0, {"payload.pkl": [b"p" * 1000]})
    run.write_submission(make_job(run_id))
    run.write_status(status)
    store.write_bytes(run.path("logs", "rank-0.log"), b"l" * 100)
    store.make_directory(run.path("checkpoints", "0000-000000"))
    store.write_bytes(run.path("checkpoints", "0000-000000", "checkpoint.json"), b"{}")
    return run


def ended(at: float, state: str = "succeeded") -> RunStatus:
    return RunStatus(state=state, heartbeat=at, ended=at)


def names(root: str) -> list[str]:
    """What lies in the store; object stores have no empty directories, though the one in memory does."""
    return [name for name in store.list_names(root) if "." in name or store.tree_size(store.join(root, name))]


@pytest.mark.parametrize(
    ("age", "due"),
    [
        (Age("succeeded", True, OLD), True),
        (Age("failed", True, OLD), True),
        (Age("cancelled", True, YOUNG), False),
        (Age("running", False, OLD), False),
        (Age(ABANDONED, True, OLD, OLD), True),
        (Age(ABANDONED, True, YOUNG, YOUNG), False),
        (Age(HALF_REMOVED, True, NOW), True),
        (Age("failed", True, OLD, claimed=YOUNG), False),
        (Age("failed", True, OLD, claimed=OLD), True),
    ],
)
def test_decision(age: Age, due: bool) -> None:
    assert is_due(age, NOW, MONTH) is due


def test_a_claim_of_this_hour_is_never_due() -> None:
    assert not is_due(Age(ABANDONED, True, NOW - 600, NOW - 600), NOW, older_than=1.0)
    assert not is_due(Age("failed", True, OLD, NOW - 600), NOW, older_than=1.0)


def test_only_old_runs_that_ended_are_removed(root: str) -> None:
    for state in ("succeeded", "failed", "cancelled"):
        make_run(root, f"old-{state}", ended(OLD, state))
    make_run(root, "young", ended(YOUNG))
    # Its driver died: nobody has written for a month.
    make_run(root, "dead", RunStatus(state="running", heartbeat=OLD, driver_host="elsewhere", driver_pid=1))
    make_run(root, "dead-lately", RunStatus(state="running", heartbeat=YOUNG, driver_host="elsewhere", driver_pid=1))
    make_run(root, "live", RunStatus(state="running", heartbeat=time.time(), driver_host="elsewhere", driver_pid=1))
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
    RunDirectory(store.join(root, "half-run")).make()
    others = ["digits-data", "huggingface", "notes.txt", "project", "service", "half-run"]

    would = collect(root, MONTH, dry_run=True)
    assert len(names(root)) == 13, "a dry run removes nothing"
    done = collect(root, MONTH)

    gone = ["dead", "old-cancelled", "old-failed", "old-succeeded"]
    assert [removed.directory.rsplit("/", 1)[-1] for removed in done.removed] == gone
    assert [removed.state for removed in done.removed] == ["failed", "cancelled", "failed", "succeeded"]
    assert replace(done, dry_run=True) == would
    assert done.kept == 3
    assert done.problems == {}
    assert done.size == sum(removed.size for removed in done.removed)
    assert all(removed.size > 1100 for removed in done.removed)
    assert json.loads(json.dumps(done.to_json()))["size"] == done.size
    assert names(root) == sorted(["dead-lately", "live", "young", *others])
    assert store.tree_size(store.join(root, "huggingface")) == 14
    assert collect(root, MONTH).removed == []
    for name in ("service", "half-run"):
        # Long after the last file was written.
        assert store.join(root, name) not in [
            removed.directory for removed in collect(root, MONTH, dry_run=True, now=NOW + 3 * MONTH).removed
        ]


def test_a_directory_that_was_claimed_but_never_written_goes_when_it_is_old(root: str) -> None:
    run = RunDirectory(store.join(root, "abandoned"))
    assert run.claim(0)
    assert collect(root, MONTH).kept == 1
    (removed,) = collect(root, MONTH, now=NOW + MONTH + DAY).removed
    assert removed.state == ABANDONED
    assert names(root) == []


def test_a_run_that_is_being_submitted_again_stays(root: str) -> None:
    run = make_run(root, "again", ended(OLD, "failed"))
    assert run.claim(1)
    assert collect(root, MONTH).removed == []
    assert run.status().state == "failed"


def test_one_unreadable_directory_stops_no_other(root: str) -> None:
    make_run(root, "a", ended(OLD))
    torn = make_run(root, "b", ended(OLD))
    store.write_bytes(torn.path("status.json"), b'{"state": "succ')
    strange = make_run(root, "c", ended(OLD))
    store.write_bytes(strange.path("job.json"), b'{"from": "the future"}')
    make_run(root, "d", ended(OLD))

    done = collect(root, MONTH)
    assert [removed.directory for removed in done.removed] == [store.join(root, "a"), store.join(root, "d")]
    assert sorted(done.problems) == [torn.directory, strange.directory]
    assert "another version of rankzero" in done.problems[strange.directory]
    assert names(root) == ["b", "c"]


@pytest.mark.parametrize("moment", ["claim_removal", "newest_claim", "job"])
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


def test_a_store_that_is_not_there_is_empty(root: str) -> None:
    assert collect(root + "/nowhere", MONTH).to_json() == {
        "removed": [],
        "kept": 0,
        "problems": {},
        "dry_run": False,
        "checkpoints": [],
        "size": 0,
    }


@pytest.mark.parametrize("older_than", [0, -1.0, "30d"])
def test_an_age_that_is_none_is_refused(root: str, older_than: object) -> None:
    with pytest.raises(InvalidJobError, match="older_than is"):
        collect(root, older_than)  # type: ignore[arg-type]


def test_links_are_left_alone(tmp_path: Path) -> None:
    elsewhere = make_run(str(tmp_path / "elsewhere"), "old", ended(OLD))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(elsewhere.directory)
    assert collect(tmp_path / "runs", MONTH).removed == []
    assert elsewhere.status().state == "succeeded"


class Killed(BaseException):
    """The end of the process, in the middle."""


def test_the_next_collection_finishes_what_a_dead_one_began(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "old", ended(OLD))
    remove, calls = store.remove, 0

    def die(location: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 or HIDDEN in location:
            raise Killed
        remove(location)

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove", die)
        with pytest.raises(Killed):
            collect(root, MONTH)
    assert not store.exists(run.path("job.json")), "there is no run any more"
    assert names(root) != []
    (removed,) = collect(root, MONTH).removed
    assert removed.state == HALF_REMOVED
    assert store.list_names(root) == [] or names(root) == []


def test_a_submission_of_the_same_run_id_gets_a_directory_of_its_own(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the old run is being removed, and waits no longer than that takes."""
    make_run(root, "same", ended(OLD, "failed"))
    run = RunDirectory(store.join(root, "same"))
    claimed, go_on = threading.Event(), threading.Event()
    claim = RunDirectory.claim_removal

    def pause(self: RunDirectory, submission: int) -> bool:
        won = claim(self, submission)
        claimed.set()
        go_on.wait(10)
        return won

    monkeypatch.setattr(RunDirectory, "claim_removal", pause)
    collector = threading.Thread(target=collect, args=(root, MONTH))
    collector.start()
    assert claimed.wait(10)
    started: list[bool] = []

    def make(number: int, first_attempt: int, fresh_since: int) -> Job:
        return replace(make_job("same", number), first_attempt=first_attempt)

    submitter = threading.Thread(
        target=lambda: started.append(
            bool(submit(run, Asked(Identity.of(train="one")), make, {"payload.pkl": [b"new"]}))
        )
    )
    submitter.start()
    time.sleep(0.2)
    assert started == [], "the claim of the collector is respected"
    go_on.set()
    collector.join(10)
    submitter.join(10)

    assert started == [True]
    job = run.job()
    assert job.first_attempt == 0, "the old run was deleted"
    assert store.read_bytes(run.submission_path(job.submission, "payload.pkl")) == b"new"
    assert run.status().state == "pending"
    assert run.token()
    assert store.list_names(run.path("checkpoints")) == []


def test_a_submission_that_was_faster_keeps_its_run(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "same", ended(OLD, "failed"))
    claim = RunDirectory.claim_removal

    def overtaken(self: RunDirectory, submission: int) -> bool:
        assert self.claim(submission)
        return claim(self, submission)

    monkeypatch.setattr(RunDirectory, "claim_removal", overtaken)
    done = collect(root, MONTH)
    assert (done.removed, done.kept) == ([], 1)
    assert run.status().state == "failed"
    assert store.exists(run.path("checkpoints", "0000-000000", "checkpoint.json"))


def test_what_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(str(tmp_path), "old", ended(OLD))
    with monkeypatch.context() as patch:
        # As `store.remove` does where files belong to somebody else.
        patch.setattr(store, "remove", lambda location: None)
        done = collect(tmp_path, MONTH)
    assert done.removed == []
    assert "cannot be removed entirely" in done.problems[run.directory]
    assert [removed.state for removed in collect(tmp_path, MONTH).removed] == [HALF_REMOVED]
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_submitter_that_died_before_its_claim_are_removed(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path / "run")).make()
    folder = tmp_path / "run" / "datasets" / "train-0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "_token").write_text("x")
    assert collect(str(tmp_path), 60.0).kept == 1
    (removed,) = collect(str(tmp_path), 60.0, now=time.time() + 2 * REMOVAL_CLAIM_TIMEOUT).removed
    assert removed.state == "abandoned"
    assert os.listdir(tmp_path) == []


def test_a_collector_that_was_stopped_gives_a_run_back_that_lives_again(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submitter has meanwhile counted its claim as that of a dead process."""
    if store.is_url(root):
        pytest.skip("an object store has no directory to rename")
    run = make_run(root, "one", ended(OLD))
    rename = os.rename

    def late(source: str, target: str) -> None:
        if source == run.directory:
            assert run.claim(2)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    done = collect(root, MONTH)
    assert (done.removed, done.problems) == ([], {})
    assert run.newest_claim() == 2
    assert os.listdir(root) == ["one"]
