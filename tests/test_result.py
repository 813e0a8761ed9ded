"""Values come back as they were, by the format that fits, and a damaged file is never opened."""

import dataclasses
import hashlib
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.conftest import until

from rankzero import ResultError, ResultRef, store
from rankzero.values import digest, formats
from rankzero.values.ref import map_refs


def stored(value: Any, tmp_path: Path) -> ResultRef:
    return ResultRef.save(value, tmp_path / "results")


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "text", [1, [2, None]], {"a": {"b": [1.5, "x"]}}, {}, [], float("inf")]
)
def test_plain_values_are_json(value: object, tmp_path: Path) -> None:
    ref = stored(value, tmp_path)
    assert ref.format == "json"
    assert ref.load() == value


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"a": (1,)}, np.float64(1.5), b"bytes", {"s": {1, 2}}])
def test_what_json_would_change_is_pickled(value: object, tmp_path: Path) -> None:
    ref = stored(value, tmp_path)
    assert ref.format == "cloudpickle"
    loaded = ref.load()
    assert loaded == value
    assert type(loaded) is type(value)


TENSORS = {
    "weight": torch.randn(3, 4),
    "half": torch.randn(5).half(),
    "brain": torch.randn(2, 2).bfloat16(),
    "bits": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 6).t(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


def test_a_dict_of_tensors_is_safetensors(tmp_path: Path) -> None:
    ref = stored(TENSORS, tmp_path)
    assert ref.format == "safetensors"
    loaded = ref.load()
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor.detach())
    assert ref.summary["tensors"] == len(TENSORS)
    assert ref.summary["parameters"] == sum(tensor.numel() for tensor in TENSORS.values())


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    theirs = safetensors.torch.load_file(stored(TENSORS, tmp_path).uri)
    assert all(torch.equal(theirs[name], tensor.detach()) for name, tensor in TENSORS.items())


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    plain = {name: tensor.detach().contiguous() for name, tensor in TENSORS.items()}
    plain["odd"] = torch.arange(3, dtype=torch.int8)
    safetensors.torch.save_file(plain, tmp_path / "theirs")
    ours = formats.read(str(tmp_path / "theirs"), "safetensors", None)
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.items())


def test_loaded_tensors_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    ref = stored({"x": torch.zeros(1000)}, tmp_path)
    ref.load()["x"].fill_(1.0)
    assert torch.equal(ref.load()["x"], torch.zeros(1000))


def test_tensors_that_share_storage_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(4)
    ref = stored({"encoder": weight, "decoder": weight}, tmp_path)
    assert ref.format == "cloudpickle"
    loaded = ref.load()
    loaded["encoder"].fill_(0.0)
    assert torch.equal(loaded["decoder"], torch.zeros(4))


@pytest.mark.parametrize(
    "value", [{"a": torch.ones(1), "b": 2}, {0: torch.ones(1)}, {"s": torch.ones(2, 2).to_sparse()}, torch.ones(2)]
)
def test_other_mixtures_with_tensors_are_pickled(value: Any, tmp_path: Path) -> None:
    assert stored(value, tmp_path).format == "cloudpickle"


def test_a_module_is_pickled_and_counted(tmp_path: Path) -> None:
    ref = stored(torch.nn.Linear(3, 2), tmp_path)
    dtypes = {"float32": {"tensors": 2, "parameters": 8, "bytes": 32}}
    expected = {"type": "torch.nn.modules.linear.Linear", "tensors": 2, "parameters": 8, "dtypes": dtypes}
    assert ref.summary == expected
    assert isinstance(ref.load(), torch.nn.Linear)


def test_a_local_class_comes_back_as_the_callers_own(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Score:
        value: float

    loaded = stored(Score(0.5), tmp_path).load()
    assert loaded == Score(0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_arrive_on_the_cpu(tmp_path: Path) -> None:
    device = torch.device("cuda")
    for value in (
        {"x": torch.ones(2, device=device)},
        [torch.ones(2, device=device)],
        torch.nn.Linear(2, 2).to(device),
    ):
        loaded = stored(value, tmp_path).load()
        tensors = loaded.parameters() if isinstance(loaded, torch.nn.Module) else loaded
        tensors = tensors.values() if isinstance(tensors, dict) else tensors
        assert all(tensor.device.type == "cpu" for tensor in tensors)


@pytest.mark.parametrize("value", [{"x": torch.zeros(100)}, (1, 2), [1, 2]])
def test_a_flipped_bit_is_found_before_anything_is_opened(value: Any, tmp_path: Path) -> None:
    ref = stored(value, tmp_path)
    data = bytearray(Path(ref.uri).read_bytes())
    data[-1] ^= 1
    Path(ref.uri).write_bytes(data)
    with pytest.raises(ResultError, match="changed or damaged"):
        ref.load()


def reads_for_checksums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    real = digest.verify

    def noted(file: Any, expected: str, location: str) -> None:
        read.append(file.name)
        real(file, expected, location)

    monkeypatch.setattr(digest, "verify", noted)
    return read


def clock_of(directory: Path) -> int:
    (directory / "clock").touch()
    return os.stat(directory / "clock").st_ctime_ns


def test_tensors_that_nobody_touched_are_not_read_for_their_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = ResultRef.from_json(json.loads(json.dumps(stored({"x": torch.ones(3)}, tmp_path).to_json())))
    read = reads_for_checksums(monkeypatch)
    assert torch.equal(ref.load()["x"], torch.ones(3))
    assert read == []
    assert torch.equal(ref.load(verify=True)["x"], torch.ones(3))
    assert read.pop() == ref.uri
    # Done to the file, though not to its bytes: what it was is read from them. The kernel tells times in ticks.
    changed = os.stat(ref.uri).st_ctime_ns
    until(lambda: clock_of(tmp_path) > changed, 10, "a tick")
    Path(ref.uri).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(ref.uri)
    assert torch.equal(ref.load()["x"], torch.ones(3))
    assert read == [ref.uri]


def test_a_change_that_hides_its_time_is_found(tmp_path: Path) -> None:
    ref = stored({"x": torch.zeros(100)}, tmp_path)
    before = os.stat(ref.uri)
    # The kernel tells times in ticks.
    until(lambda: clock_of(tmp_path) > before.st_ctime_ns, 10, "a tick")
    with open(ref.uri, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(ref.uri, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ResultError, match="changed or damaged"):
        ref.load()


@pytest.mark.parametrize("value", [(1, 2), [1, 2], torch.nn.Linear(2, 2)])
def test_what_is_no_plain_tensors_is_always_checked(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = stored(value, tmp_path)
    assert ref.fingerprint is None
    forged = dataclasses.replace(ref, fingerprint=store.fingerprint(ref.uri))
    for handle in (ref, forged):
        read = reads_for_checksums(monkeypatch)
        handle.load()
        assert read == [ref.uri]
        monkeypatch.undo()


def test_large_tensors_are_written_while_their_checksum_is_behind(tmp_path: Path) -> None:
    # Transposed, so that what is written is a copy that nobody else keeps.
    state = {f"layer{number}": torch.full((3 << 10, 1 << 10), float(number)).t() for number in range(8)}
    ref = stored(state, tmp_path)
    assert ref.sha256 == hashlib.sha256(Path(ref.uri).read_bytes()).hexdigest()
    assert all(torch.equal(tensor, state[name]) for name, tensor in safetensors.torch.load_file(ref.uri).items())


def hashing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rankzero-digest")]


def test_a_disk_that_is_full_leaves_no_thread_behind() -> None:
    with pytest.raises(OSError, match="No space left"):
        formats.write({"x": torch.zeros(8 << 20)}, "safetensors", "/dev/full")
    assert not hashing_threads()


@pytest.mark.timeout(60)
def test_a_checksum_that_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        def update(self, chunk: memoryview) -> None:
            raise MemoryError("no memory to hash in")

    monkeypatch.setitem(digest._OF_BLOCK, digest.SUMS, NoMemory)
    with pytest.raises(MemoryError, match="to hash in"):
        formats.write({f"x{number}": torch.zeros(20 << 20) for number in range(5)}, "safetensors", str(tmp_path / "x"))
    assert not hashing_threads()


def test_what_exit_handlers_save_has_its_checksum_where_no_thread_begins_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        size, found = formats.write({"x": torch.ones(9 << 20), "y": torch.ones(3)}, "safetensors", str(tmp_path / "x"))
    assert found == digest.digest_of_file(str(tmp_path / "x"), found)
    assert size == (tmp_path / "x").stat().st_size


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    ref = stored([1], tmp_path)
    Path(ref.uri).unlink()
    with pytest.raises(ResultError, match="does not exist"):
        ref.load()


def test_a_value_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="of type builtins.generator cannot be pickled"):
        stored((n for n in range(3)), tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot be stored in"):
        ResultRef.save([1], tmp_path / "file" / "below")


def test_a_handle_survives_json_pickle_and_airflow(tmp_path: Path) -> None:
    ref = stored({"x": torch.zeros(2)}, tmp_path)
    assert ResultRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert ResultRef.deserialize(ref.serialize(), 1) == ref
    with pytest.raises(TypeError, match="version 1, not 2"):
        ResultRef.deserialize(ref.serialize(), 2)


def test_saving_twice_keeps_one_file(tmp_path: Path) -> None:
    assert stored([1, 2], tmp_path) == stored([1, 2], tmp_path)
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_urls_work_like_paths() -> None:
    ref = ResultRef.save({"x": torch.arange(5)}, "memory://bucket/results")
    assert ref.uri.startswith("memory://bucket/results/")
    assert torch.equal(ref.load()["x"], torch.arange(5))


def test_references_are_replaced_deep_inside() -> None:
    ref = ResultRef("/x", "json", "0", 1)
    value = {"a": [ref, (1, ref)], "b": {"c": ref}, "d": "kept"}
    assert map_refs(value, lambda r: r.uri) == {"a": ["/x", (1, "/x")], "b": {"c": "/x"}, "d": "kept"}


def test_only_containers_that_hold_a_reference_are_made_anew() -> None:
    ref, kept = ResultRef("/x", "json", "0", 1), {"plain": [1, (2,)]}
    twice = [ref]
    value = {"a": twice, "b": (twice, kept), "c": kept}
    mapped = map_refs(value, lambda r: [r.uri])
    assert mapped["a"] is mapped["b"][0]
    assert mapped["b"][1] is mapped["c"] is kept
    assert map_refs(kept, lambda r: r.uri) is kept
    assert twice == [ref]


def test_a_reference_that_is_given_twice_is_opened_once() -> None:
    ref = ResultRef("/x", "json", "0", 1)
    first, second = map_refs((ref, {"again": ref}), lambda r: [r.uri])
    assert first is second["again"]


def test_containers_that_hold_themselves_keep_their_form() -> None:
    loop: list[Any] = [ResultRef("/x", "json", "0", 1)]
    loop.append((loop, {"back": loop}))
    mapped = map_refs(loop, lambda r: r.uri)
    assert mapped[0] == "/x"
    assert mapped[1][0] is mapped
    assert mapped[1][1]["back"] is mapped
    endless: list[Any] = []
    endless.append(endless)
    assert map_refs(endless, lambda r: r.uri) is endless


def test_references_are_found_however_deep_they_are() -> None:
    value: Any = ResultRef("/x", "json", "0", 1)
    for _ in range(100_000):
        value = [value]
    found: list[str] = []
    map_refs(value, lambda r: found.append(r.uri))
    assert found == ["/x"]


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 64, b"\x10" + b"\x00" * 7 + b"{}"])
def test_a_file_that_is_no_safetensors_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ResultError):
        formats.read(str(tmp_path / "file"), "safetensors", None)
