"""Which checkpoint is tried again while the store fails, and which gives way to a newer one."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.runs import submitted

from rankzero import CheckpointConfig, store
from rankzero.channel.messages import NEVER, Finished, Part
from rankzero.driver.ending import Facts
from rankzero.driver.storage import Storage
from rankzero.run.checkpoints import Manifest, list_committed
from rankzero.run.directory import RunDirectory, Submission


def storage_of(own: Submission, attempt: int = 0, world_size: int = 1, num_to_keep: int | None = 1) -> Storage:
    """The storage of an attempt."""
    facts, config = Facts(world_size, own.run.directory), CheckpointConfig(num_to_keep=num_to_keep)
    return Storage(own, attempt, config, facts, own.path("result"))


class Commits:
    """A storage whose store fails once, and what came of what it was given."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        world_size: int = 1,
        num_to_keep: int | None = None,
    ) -> None:
        self.directory = directory
        self._committed: list[int] = []
        self._lost: list[int] = []
        self.own = submitted(str(directory))
        sizes, errors = store.sizes, [OSError("for a moment")]

        def fail_once(folder: str) -> dict[str, int]:
            if errors:
                raise errors.pop()
            return sizes(folder)

        monkeypatch.setattr(store, "sizes", fail_once)
        monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")

        self._gate = threading.Event()
        assert self.own.claim_driver()
        self.storage = storage_of(self.own, 0, world_size, num_to_keep)
        # Everything else waits behind it.
        self.storage.submit(self._gate.wait)

    def add(self, index: int, rank: int = 0, *, sharded: bool = False, upload: str | None = None) -> None:
        folder = Path(self.own.path("checkpoints", f"0000-{index:06d}"))
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank-{rank}.json"
        file.write_text("{}")
        facts: dict[str, Any] = {"path": str(file), "shared": True, "time": 0.0, "metrics": {}, "sharded": sharded}
        facts |= {"file": file.name, "format": "json", "size": 2, "sha256": ""}
        self.storage.add_part(rank, Part(id=folder.name, index=index, upload=upload, **facts))

    def _poll(self) -> None:
        for settled in self.storage.settled():
            if isinstance(settled, Manifest):
                self._committed.append(settled.index)
            else:
                self._lost.append(settled)

    @property
    def committed(self) -> list[int]:
        self._poll()
        return self._committed

    @property
    def lost(self) -> list[int]:
        self._poll()
        return self._lost

    def open(self) -> None:
        self._gate.set()

    def await_commit(self, index: int) -> None:
        until(lambda: index in self.committed, 60.0, "the commit")

    def on_disk(self) -> list[int]:
        """Returns the committed checkpoints that are left, once everything that was queued is done."""
        until(lambda: not self.storage.is_busy, 60.0, "an idle committer")
        return [manifest.index for manifest in list_committed([self.own.directory])]

    def finish(self) -> None:
        self._gate.set()
        self.storage.close(60.0)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commits:
    return Commits(tmp_path, monkeypatch)


def test_the_last_checkpoint_is_tried_again_whatever_else_waits(work: Commits) -> None:
    work.add(0)
    work.storage.end("")
    work.finish()
    assert (work.committed, work.lost) == ([0], [])


def test_a_sharded_checkpoint_waits_for_all_parts_until_a_later_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Commits(tmp_path, monkeypatch, world_size=2)
    work.open()
    for index in range(8):
        work.add(index, 0, sharded=True)
    # The late rank gives the same number of parts, one by one, and one of them is lost.
    work.add(1, 1, sharded=True)
    work.await_commit(1)
    work.storage.lose(4)
    work.add(4, 1, sharded=True)
    work.add(5, 1, sharded=True)
    work.await_commit(5)
    assert (work.committed, work.lost) == ([1, 5], [4])
    files = Path(work.own.path("checkpoints")).glob
    assert work.on_disk() == [1, 5]
    assert sorted(int(file.parent.name[-1]) for file in files("*/rank-*")) == [1, 1, 5, 5, 6, 7]
    work.storage.end("")
    work.finish()
    assert sorted(int(file.parent.name[-1]) for file in files("*/rank-*")) == [1, 1, 5, 5]


def test_what_arrived_of_a_part_that_is_lost_is_removed(work: Commits) -> None:
    arrived = Path(work.own.path("result", ".upload-part"))
    arrived.write_text("{")
    work.add(0, upload="part")
    work.finish()
    assert (work.lost, arrived.exists()) == ([0], False)


def test_a_checkpoint_gives_way_to_a_newer_one(work: Commits) -> None:
    work.add(0)
    work.add(1)
    work.finish()
    assert (work.committed, work.lost) == ([1], [0])


def test_a_checkpoint_that_a_newer_one_has_overtaken_is_left_out(work: Commits) -> None:
    work.open()
    work.add(1)
    work.await_commit(1)
    work.add(0)
    work.finish()
    assert (work.committed, work.lost) == ([1], [])


def test_a_checkpoint_that_ranks_may_read_is_kept_until_there_are_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be reading it, since the message about the one that replaces it is on its way."""
    work = Commits(tmp_path, monkeypatch, num_to_keep=1)
    work.open()
    assert work.storage.begin()[0] is None
    for index, kept in enumerate([[0], [0, 1], [1, 2]]):
        work.add(index)
        work.await_commit(index)
        assert work.on_disk() == kept
    work.storage.end("")
    assert work.on_disk() == [2]
    work.finish()


def test_ranks_are_told_of_checkpoints_in_their_order(work: Commits) -> None:
    """To a rank, all checkpoints up to one that is lost or committed are either. Rank 0's end settles all."""
    work.add(0)
    work.storage.lose(1)
    result = {"format": "json", "digest": "", "size": 0, "path": "gone", "summary": {}}
    work.storage.finish(0, Finished(0.0, result), {})
    assert (work.committed, work.lost) == ([], [])
    work.finish()
    assert (work.committed, work.lost) == ([0], [1, NEVER])


def test_a_commit_that_ends_after_its_attempt_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt starts from the checkpoint before; the one that comes too late has lost its parts by then."""
    work = Commits(tmp_path, monkeypatch, num_to_keep=1)
    work.open()
    assert work.storage.begin()[0] is None
    work.add(0)
    work.await_commit(0)
    is_written, may_write, write_bytes = threading.Event(), threading.Event(), store.write_bytes

    def write(location: str, content: bytes, **options: Any) -> None:
        is_written.set()
        assert may_write.wait(60.0)
        write_bytes(location, content, **options)

    monkeypatch.setattr(store, "write_bytes", write)
    work.add(1)
    assert is_written.wait(60.0)
    work.storage.close(0.0)
    resumed = storage_of(RunDirectory(str(tmp_path)).current(), 1).begin()[0]
    assert resumed is not None
    assert resumed.index == 0
    # An object store needs no folder.
    Path(work.own.path("checkpoints", "0000-000001")).mkdir()
    may_write.set()
    work.finish()
    assert work.on_disk() == [0, 1]


def test_a_checkpoint_with_damaged_files_is_skipped_and_named(
    work: Commits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work.open()
    for index in range(2):
        work.add(index)
        work.await_commit(index)
    work.finish()
    file = Path(work.own.directory) / "checkpoints" / "0000-000001" / "rank-0.json"
    for damage in (lambda: file.write_bytes(b""), file.unlink):
        damage()
        later = storage_of(work.own, 1)
        newest = later.begin()[0]
        assert newest
        assert newest.id == "0000-000000"
        later.end("")
        later.close(60.0)
        assert "checkpoint 0000-000001 is not used" in caplog.text
        assert sorted(store.list_names(str(Path(work.own.directory) / "checkpoints"))) == ["0000-000000", "0000-000001"]
        caplog.clear()


def test_files_of_the_user_beside_the_checkpoints_stay_and_are_not_read(work: Commits) -> None:
    work.open()
    for index in range(2):
        work.add(index)
        work.await_commit(index)
    work.finish()
    place = Path(work.own.directory) / "checkpoints"
    (place / "notes.txt").write_text("mine")
    # A copy names an older checkpoint; others look like names of checkpoints.
    shutil.copytree(place / "0000-000000", place / "best")
    shutil.copytree(place / "0000-000000", place / "9999-000000")
    for name in ("export/model.onnx", "20261125-143000/log.txt", "0000-000008/rank-0.json.backup-1"):
        (place / name).parent.mkdir()
        (place / name).write_text("mine")
    (place / "0000-000009").write_text("mine")
    mine = {path for path in place.rglob("*") if not path.is_relative_to(place / "0000-000000")}
    for file in ("rank-0.json", f".writing-{'0a' * 8}"):
        (place / "0000-000002").mkdir(exist_ok=True)
        (place / "0000-000002" / file).write_text("not committed")

    beside = [".env", "value-0.of-gold.txt"]
    for file in (f".writing-{'0a' * 8}", ".committing-12.json", ".upload-rank-0-value", "value-0.json", *beside):
        Path(work.own.path("result", file)).write_text("not the value")

    later = storage_of(work.own, 1)
    newest = later.begin()[0]
    later.end("")
    later.close(60.0)
    assert newest
    assert newest.id == "0000-000001"
    assert sorted(store.list_names(work.own.path("result"))) == beside
    assert [manifest.id for manifest in list_committed([work.own.directory])] == ["0000-000001"]
    assert set(place.rglob("*")) == mine, "one that is not kept, and one that was not committed, are removed"
