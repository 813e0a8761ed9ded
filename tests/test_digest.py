"""A checksum names its algorithm; large files are compared by all cores, and ``sha256sum`` stays to be had."""

import hashlib
import zlib
from pathlib import Path

import numpy
import pytest
import torch

from rankzero import ResultError, ResultRef
from rankzero.values import digest
from rankzero.values.digest import Digest, digest_of, digest_of_file, verify
from rankzero.values.pickled import LARGE, pack


def crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def test_it_is_one_of_blocks_wherever_the_parts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 10)
    data = bytes(range(47))
    blocks = [hashlib.sha256(data[start : start + 10]).digest() for start in range(0, 47, 10)]
    expected = "sha256-8m:" + hashlib.sha256(b"".join(blocks)).hexdigest()
    path = tmp_path / "file"
    path.write_bytes(data)
    assert digest_of_file(str(path)) == expected
    for cut in range(48):
        assert digest_of([data[:cut], memoryview(data)[cut:]]) == expected
    sums = hashlib.sha256(b"".join(crc32(data[start : start + 10]) for start in range(0, 47, 10))).hexdigest()
    for algorithm, text in ((digest.BLOCKS, expected), (digest.SUMS, f"crc32-8m:{sums}")):
        one = Digest(algorithm, threads=False)
        for byte in data:
            one.update(bytes([byte]))
        assert (one.text(), one.size) == (text, 47)
        assert digest_of_file(str(path), text) == text


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_of_one_block_it_is_the_plain_sha256(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 10)
    (tmp_path / "file").write_bytes(bytes(size))
    assert digest_of_file(str(tmp_path / "file")) == f"sha256:{hashlib.sha256(bytes(size)).hexdigest()}"


def test_memory_that_is_used_again_was_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 1 << 16)
    memory, one = bytearray(1 << 20), Digest()
    one.update(memory)
    memory[:] = b"x" * len(memory)
    assert one.text() == digest_of([bytes(1 << 20)])
    one.close()


@pytest.mark.parametrize("place", [9, 200, LARGE // 2, -1])
def test_one_changed_bit_anywhere_is_noticed(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", LARGE // 5)
    parts = pack(b"x" * 100, [memoryview(numpy.arange(LARGE + 1, dtype=numpy.uint8))])
    path = tmp_path / "file"
    path.write_bytes(b"".join(parts))
    found = digest_of(parts)
    assert digest_of_file(str(path)) == found
    changed = bytearray(path.read_bytes())
    changed[place] ^= 1
    path.write_bytes(changed)
    assert digest_of_file(str(path)) != found
    changed[place] ^= 1
    path.write_bytes(changed[:-1])
    assert digest_of_file(str(path)) != found


def test_a_plain_sha256_is_one_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 10)
    (tmp_path / "file").write_bytes(bytes(47))
    plain = hashlib.sha256(bytes(47)).hexdigest()
    for recorded in (plain, f"sha256:{plain}"):
        with open(tmp_path / "file", "rb") as file:
            verify(file, recorded)
            assert file.tell() == 0
    with open(tmp_path / "file", "rb") as file, pytest.raises(ResultError, match="changed or damaged"):
        verify(file, plain[::-1])


@pytest.mark.parametrize("name", ["md5", "sha256-16m", ":"])
def test_an_algorithm_that_is_not_known_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(ResultError, match=rf"{name}:.* is of an algorithm that is not known here: upgrade"):
        ResultRef(str(tmp_path / "file"), "json", f"{name}:aa", 1).load()


def test_a_large_result_names_its_algorithm_and_gives_its_sha256_on_request(tmp_path: Path) -> None:
    large = ResultRef.save({"x": torch.zeros(3 << 20)}, tmp_path)
    small = ResultRef.save({"x": torch.zeros(3)}, tmp_path)
    # Loading it runs code.
    pickled = ResultRef.save([torch.zeros(3 << 20)], tmp_path)
    refs = (large, small, pickled)
    assert [ref.digest.split(":")[0] for ref in refs] == ["crc32-8m", "sha256", "sha256-8m"]
    for ref in refs:
        assert ref.sha256 == hashlib.sha256(Path(ref.uri).read_bytes()).hexdigest()
    Path(large.uri).unlink()
    with pytest.raises(ResultError, match="does not exist"):
        large.sha256  # noqa: B018
