"""A digest is that of the file's blocks, whatever pieces it was written in."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero import ResultError, ResultRef
from rankzero.values import digest

DATA = bytes(range(256)) * 4096


def expected_of(data: bytes, block: int) -> str:
    if len(data) <= block:
        return "sha256:" + hashlib.sha256(data).hexdigest()
    blocks = [hashlib.sha256(data[start : start + block]).digest() for start in range(0, len(data), block)]
    return "sha256-8m:" + hashlib.sha256(b"".join(blocks)).hexdigest()


@pytest.mark.parametrize("block", [100_000, len(DATA) // 2, len(DATA), 8 << 20])
@pytest.mark.parametrize("piece", [1000, 300_000, len(DATA)])
def test_it_is_one_of_blocks_wherever_pieces_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, block: int
) -> None:
    monkeypatch.setattr(digest, "BLOCK", block)
    monkeypatch.setattr(digest, "_READ", block // 4)
    path, memory = tmp_path / "file", bytearray(piece)
    with path.open("w+b") as file:
        hashing = digest.FileDigest(file)
        for start in range(0, len(DATA), piece):
            # The caller may reuse its memory once `write` has returned.
            length = len(DATA[start : start + piece])
            memory[:length] = DATA[start : start + piece]
            hashing.write(memoryview(memory)[:length])
        assert hashing.text() == expected_of(DATA, block)
    assert path.read_bytes() == DATA
    called: list[int] = []
    with path.open("rb") as file:
        assert digest.FileDigest(file).text(lambda: called.append(1)) == expected_of(DATA, block)
    assert called == [1]
    assert digest.digest_of([DATA[:piece], memoryview(DATA)[piece:]]) == expected_of(DATA, block)


def test_an_error_of_a_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 1 << 20)

    def fail() -> None:
        raise OSError("no room on the disk")

    (tmp_path / "file").write_bytes(bytes(4 << 20))
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="no room"):
        digest.FileDigest(file).text(fail)


def test_a_changed_bit_is_damage(tmp_path: Path) -> None:
    recorded = digest.digest_of([DATA])
    (tmp_path / "file").write_bytes(DATA)
    with open(tmp_path / "file", "rb") as file:
        digest.verify(file, recorded)
        assert file.tell() == 0
    (tmp_path / "file").write_bytes(DATA[:-1] + b"\0")
    with open(tmp_path / "file", "rb") as file, pytest.raises(ResultError, match="changed or damaged") as found:
        digest.verify(file, recorded)
    assert found.value.is_damage


@pytest.mark.parametrize("name", ["md5:", "sha256-16m:", ":", ""])
def test_an_algorithm_that_is_not_known_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(ResultError, match=f"{name}aa is of an algorithm that is not known here: upgrade"):
        ResultRef(str(tmp_path / "file"), "json", f"{name}aa", 1).load()


def test_a_handle_gives_what_sha256sum_prints(tmp_path: Path) -> None:
    values: list[Any] = [{"x": torch.zeros(3 << 20)}, [torch.zeros(3 << 20), {1}], {1, 2}, [1, 2]]
    refs = [ResultRef.save(value, tmp_path) for value in values]
    assert [ref.digest.split(":")[0] for ref in refs] == ["sha256-8m", "sha256-8m", "sha256", "sha256"]
    for ref in refs:
        assert ref.sha256 == hashlib.sha256(Path(ref.uri).read_bytes()).hexdigest()
    Path(refs[0].uri).unlink()
    with pytest.raises(ResultError, match="does not exist"):
        refs[0].sha256  # noqa: B018
