"""Whose run directories are used: what lies in them is executed."""

import os
import stat
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.conftest import find

from rankzero import InvalidJobError, Launcher, store
from rankzero.run.directory import RunDirectory
from rankzero.store import why_untrusted
from rankzero.store.location import TRUSTED_OWNERS

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")


def refuses_a_directory(directory: Path, launcher: Launcher, match: str) -> None:
    before = sorted(directory.rglob("*"))
    with pytest.raises(InvalidJobError, match=match):
        launcher.options(run_id=directory.name, store=directory.parent).run(abs, -1)
    assert sorted(directory.rglob("*")) == before, "nothing is written there"


@needs_root
def test_a_run_directory_that_another_user_made_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    launcher = launcher.options(num_processes=1)
    shared = tmp_path / "shared"
    planted = shared / "nightly"
    planted.mkdir(parents=True)
    shared.chmod(0o1777)
    planted.chmod(0o777)
    os.chown(planted, NOBODY, NOBODY)
    refuses_a_directory(planted, launcher, rf"nightly belongs to user .*{NOBODY}.*choose another run_id")
    # Not through a link to a directory of ours, either.
    os.rmdir(planted)
    own = tmp_path / "own"
    own.mkdir(0o700)
    planted.symlink_to(own)
    os.chown(planted, NOBODY, NOBODY, follow_symlinks=False)
    refuses_a_directory(planted, launcher, rf"belongs to user .*{NOBODY}")


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints/epoch-1", "checkpoints/0000-000001/notes.txt", "token", "thesis.tex", "tables"),
        *("tables/2023/q1.parquet", "tables/2023/q1/part-1.parquet", "logs/app.log", "result/.env-backup"),
        *("submissions/2026/essay.txt", "datasets/squad/1/x", "flight/ba-117.json", "logs/a/.writing-b"),
    ],
)
def test_a_directory_with_files_of_others_becomes_no_run_directory(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "mnist" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    shown = "/".join(name.split("/")[: 2 if name.startswith("submissions/") else 1])
    refuses_a_directory(tmp_path / "mnist", launcher, rf"mnist holds files of others \({shown}\)")


def write_everything() -> object:
    import rankzero.train as rt

    rt.get_dataset_shard()
    table = rt.write_rows({"rank": [rt.get_context().rank]})
    rt.report({"loss": 1.0}, checkpoint={"rank": 0}, sharded=True)
    rt.context.await_checkpoint()
    return table


@pytest.mark.parametrize("place", ["local", pytest.param("bucket", marks=pytest.mark.soak)])
def test_a_directory_with_files_of_a_removed_run_becomes_a_run_directory(
    launcher: Launcher, request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    """A driver and ranks may write anything after the removal, except a job."""
    rows = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"x": range(8)}), rows)
    launcher = launcher.options(run_id="removed", dataset=rows)
    if place == "bucket":
        launcher = launcher.options(store=f"{request.getfixturevalue('bucket')}/runs")
    launcher.run(write_everything)
    handle = find(launcher)
    assert handle
    run = RunDirectory(handle.directory)
    assert run.strangers() == []
    store.remove(run.job_path(0))
    assert find(launcher) is None
    launcher.run(write_everything)


def test_a_run_directory_that_everybody_may_write_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    open_to_all = tmp_path / "nightly"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    refuses_a_directory(open_to_all, launcher.options(num_processes=1), "can be written by every user of this machine")
    # A group is somebody's choice.
    open_to_all.chmod(0o770)
    assert why_untrusted(str(open_to_all)) is None


@needs_root
def test_owners_that_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, of_root = tmp_path / "theirs", tmp_path / "of_root"
    for made in (theirs, of_root):
        made.mkdir(0o700)
    os.chown(theirs, NOBODY, NOBODY)
    assert why_untrusted(str(theirs))
    monkeypatch.setenv(TRUSTED_OWNERS, f"7, {NOBODY}")
    assert why_untrusted(str(theirs)) is None
    monkeypatch.delenv(TRUSTED_OWNERS)
    # Root may do everything anyway.
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert why_untrusted(str(of_root)) is None
    # A mount that shows every file as one user's, as it shows those of this process.
    assert why_untrusted(str(theirs))
    stat_of = os.stat

    def squashed(path: str, **options: bool) -> os.stat_result:
        found = stat_of(path, **options)
        return os.stat_result((*found[:4], NOBODY, *found[5:]))

    monkeypatch.setattr(os, "stat", squashed)
    monkeypatch.setattr(os, "lstat", squashed)
    assert why_untrusted(str(theirs)) is None


def test_directories_are_private_all_the_way(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store.make_directory(str(tmp_path / "a" / "b" / "c"))
    finally:
        os.umask(before)
    for made in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700
    store.make_directory(str(tmp_path / "a" / "b" / "c"))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        store.make_directory(str(tmp_path / "file"))
