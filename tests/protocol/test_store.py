"""What the store does when it fails for a moment, and when it goes on failing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rankzero import store


class Refusing:
    """An action that fails so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error, self.calls = times, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def test_a_failure_of_a_moment_is_tried_again() -> None:
    action = Refusing(3, ConnectionResetError("outage"))
    assert store.patiently(action, 20.0, 0.001) == "done"
    assert action.calls == 4


@pytest.mark.parametrize(
    ("seconds", "give_up"),
    [(0.0, lambda error: False), (20.0, lambda error: isinstance(error, ConnectionError))],
    ids=["the time is up", "another try is of no use"],
)
def test_the_last_error_is_raised(seconds: float, give_up: Callable[[Exception], bool]) -> None:
    action = Refusing(1000, ConnectionResetError("outage"))
    with pytest.raises(ConnectionResetError, match="outage"):
        store.patiently(action, seconds, 0.01, give_up)
    assert action.calls <= 2


def test_an_interrupt_is_not_tried_again() -> None:
    def action() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.patiently(action, 20.0, 0.01)


def test_a_file_is_copied_within_its_store_without_being_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    assert store.copy_within(str(source), str(tmp_path / "target"))
    assert (tmp_path / "target").samefile(source)
    store.write_bytes("memory://bucket/source", b"weights")
    assert store.copy_within("memory://bucket/source", "memory://bucket/deep/target")
    assert store.read_bytes("memory://bucket/deep/target") == b"weights"


def test_a_copy_between_stores_is_left_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    assert not store.copy_within(str(source), "memory://bucket/other")
    assert not store.exists("memory://bucket/other")

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert not store.copy_within(str(source), str(tmp_path / "target"))


@pytest.mark.parametrize("root", ["memory://bucket", "tmp"])
def test_what_is_not_there_cannot_be_copied(root: str, tmp_path: Path) -> None:
    root = str(tmp_path) if root == "tmp" else root
    with pytest.raises(FileNotFoundError):
        store.copy_within(f"{root}/missing", f"{root}/target")


def test_of_two_creators_of_a_file_one_wins_also_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("this file system has no links")

    for name in ("with", "without"):
        path = tmp_path / name
        assert store.create(str(path), b"first")
        assert not store.create(str(path), b"second")
        assert path.read_bytes() == b"first"
        monkeypatch.setattr(os, "link", refuse)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["with", "without"]
    with pytest.raises(FileNotFoundError):
        store.create(str(tmp_path / "nowhere" / "claim"), b"first")


def test_a_store_is_cleared_of_unfinished_files_and_of_no_others(tmp_path: Path) -> None:
    """Names that only resemble those of rankzero are a user's."""
    left = [
        *(".writing-0123456789abcdef", ".rankzero-probe-0123abcd", ".committing-12.json"),
        *(".upload-rank-0-value", ".upload-0000-000001-rank-1.torch"),
    ]
    others = [
        "essay.writing",
        ".writing-workshop",
        ".writing-0123456789abcdef.txt",
        ".committing-to-it",
        ".upload-1-of-2",
    ]
    for name in [*left, *others]:
        (tmp_path / name).write_text("text")
    for name in ("creative.writing", ".writing-workshop-2", ".writing-chapters", ".rankzero-probe-notes_of"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text("text")
    # A folder of `tempfile`, by which the owner of new files is found.
    (tmp_path / ".rankzero-probe-x_1yz2ab").mkdir()
    before = set(tmp_path.rglob("*"))
    removed = {tmp_path / name for name in (*left, ".rankzero-probe-x_1yz2ab")}
    for path in before:
        os.utime(path, (0, 0))
    store.prove(str(tmp_path))
    assert set(tmp_path.rglob("*")) == before - removed
    (tmp_path / left[0]).write_text("begun just now")
    store.remove_unfinished(str(tmp_path))
    assert set(tmp_path.rglob("*")) == before - removed | {tmp_path / left[0]}
