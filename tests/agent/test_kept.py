"""The user's code on a host: fetched once, proved each time, and no more of it than a few files."""

import os
from pathlib import Path

import pytest

from rankzero.agent.inputs import KEPT, KeptFiles
from rankzero.values.digest import digest_of


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/elsewhere,{tmp_path / 'local'}")
    place = tmp_path / "local" / "agent-1"
    place.mkdir(parents=True)
    return place


def keep(scratch: Path, data: bytes) -> str:
    file = scratch / "code.tar.gz"
    file.unlink(missing_ok=True)
    file.write_bytes(data)
    KeptFiles(str(scratch)).keep(digest_of([data]), str(file))
    return digest_of([data])


def take(scratch: Path, digest: str) -> bytes | None:
    path = scratch / "taken"
    path.unlink(missing_ok=True)
    return path.read_bytes() if KeptFiles(str(scratch)).take(digest, str(path)) else None


def test_a_later_agent_of_the_host_takes_what_an_earlier_one_fetched(scratch: Path) -> None:
    digest = keep(scratch, b"code")
    other = scratch.with_name("agent-2")
    other.mkdir()
    assert take(other, digest) == b"code"
    assert take(other, digest_of([b"other code"])) is None


def test_what_was_damaged_is_fetched_again(scratch: Path) -> None:
    digest = keep(scratch, b"code")
    (kept,) = (path for path in scratch.parent.glob("rankzero-files-*/*"))
    kept.write_bytes(b"evil")
    assert take(scratch, digest) is None
    assert not kept.exists()


def test_a_folder_that_others_may_write_is_not_read(scratch: Path) -> None:
    digest = keep(scratch, b"code")
    (folder,) = scratch.parent.glob("rankzero-files-*")
    folder.chmod(0o777)
    assert take(scratch, digest) is None


def test_only_the_last_used_stay(scratch: Path) -> None:
    digests = []
    for number in range(KEPT):
        digests.append(keep(scratch, bytes([number])))
        os.utime(next(scratch.parent.glob(f"rankzero-files-*/{digests[-1].replace(':', '-')}")), (number, number))
    assert take(scratch, digests[0]) is not None
    keep(scratch, b"one more")
    assert [take(scratch, digest) is not None for digest in digests] == [True, False, *[True] * (KEPT - 2)]


def test_where_nobody_would_remove_it_nothing_is_kept(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/elsewhere")
    keep(scratch, b"code")
    assert list(scratch.parent.iterdir()) == [scratch]
