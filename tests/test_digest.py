"""A digest is the file's sha256, whatever pieces it was written in."""

import hashlib
from pathlib import Path

import pytest
import torch

from rankzero import ResultError, ResultRef
from rankzero.values import digest

DATA = bytes(range(256)) * 4096


@pytest.mark.parametrize("piece", [1000, 300_000, len(DATA)])
def test_it_is_the_sha256_of_the_file(tmp_path: Path, piece: int) -> None:
    path, memory = tmp_path / "file", bytearray(piece)
    with path.open("wb") as file:
        hashing = digest.HashingFile(file)
        for start in range(0, len(DATA), piece):
            # The caller may reuse its memory once `write` has returned.
            length = len(DATA[start : start + piece])
            memory[:length] = DATA[start : start + piece]
            hashing.write(memoryview(memory)[:length])
    expected = "sha256:" + hashlib.sha256(DATA).hexdigest()
    assert (hashing.digest, hashing.size, path.read_bytes()) == (expected, len(DATA), DATA)
    assert digest.digest_of_file(str(path)) == expected
    assert digest.digest_of([DATA[:piece], memoryview(DATA)[piece:]]) == expected


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


@pytest.mark.parametrize("name", ["md5:", "sha256-8m:", ":", ""])
def test_an_algorithm_that_is_not_known_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(ResultError, match=f"{name}aa is of an algorithm that is not known here: upgrade"):
        ResultRef(str(tmp_path / "file"), "json", f"{name}aa", 1).load()


def test_a_handle_has_what_sha256sum_prints(tmp_path: Path) -> None:
    for value in ({"x": torch.zeros(3 << 20)}, [torch.zeros(3), "a"], {1, 2}, [1, 2]):
        ref = ResultRef.save(value, tmp_path)
        assert ref.digest == f"sha256:{ref.sha256}"
        assert ref.sha256 == hashlib.sha256(Path(ref.uri).read_bytes()).hexdigest()
