"""Values come back as they were, by the format that fits, and a damaged file is never opened."""

import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.kinds_of_values import same

from rankzero import ResultError, ResultRef
from rankzero.values import formats
from rankzero.values.formats import BLOCK, digest_of
from rankzero.values.ref import map_refs


def stored(value: Any, tmp_path: Path) -> ResultRef:
    return ResultRef.save(value, tmp_path / "results")


FORMATS: dict[str, list[Any]] = {
    "json": [None, True, 3, 2.5, "text", [1, [2, None]], {"a": {"b": [1.5, "x"]}}, {}, [], float("inf")],
    "torch": [
        torch.ones(2),
        {0: torch.ones(1)},
        {"a": torch.ones(1), "b": [2, (None, "c")]},
        {"rate": 0.5, "long": -(2**2031), "float8": torch.ones(2).to(torch.float8_e4m3fn)},
    ],
    "pickle": [
        *[(1, 2), {1: 2}, {"a": (1,)}, np.float64(1.5), b"bytes", {"s": {1, 2}}],
        {"s": torch.ones(2, 2).to_sparse()},
        [torch.ones(1), {1}],
        [torch.ones(1), 2**3000],
        [torch.ones(1), "\ud800"],
        [torch.ones(1), np.float64(1)],
        [(x := torch.ones(1)), x.view(torch.int32)],
        torch.zeros(1, dtype=torch.uint8).view(torch.uint4),
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FORMATS.items() for value in values])
def test_a_format_is_chosen_that_returns_the_value(name: str, value: Any, tmp_path: Path) -> None:
    ref = stored(value, tmp_path)
    assert ref.format == name
    assert same(ref.load(), value)


def test_loaded_tensors_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    ref = stored({"x": torch.zeros(1000)}, tmp_path)
    ref.load()["x"].fill_(1.0)
    assert torch.equal(ref.load()["x"], torch.zeros(1000))


def test_no_torch_is_needed_for_what_has_no_tensors(tmp_path: Path) -> None:
    ref = stored([{1, 2}, np.arange(100_000)], tmp_path)
    program = f"""
import sys
from rankzero import ResultRef
ref = ResultRef.from_json({ref.to_json()!r})
print(ref.load()[1].sum(), ResultRef.save({{1, 2}}, {str(tmp_path)!r}).format, 'torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4999950000", "pickle", "False"]


def test_equal_values_have_equal_digests_whichever_of_their_parts_are_one_object(tmp_path: Path) -> None:
    def text(word: str) -> str:
        return "".join(list(word))

    pair, word, none = (0.5, "cpu"), "weight", torch.zeros(0)
    base = torch.arange(100_000.0)
    ones = [
        {word: torch.ones(2), "name": word, "rates": [pair, pair], "where": ["cpu", "storage"], "part": base[7:9]},
        [{word, "bias", "norm"}, [word, word, b"ab", b"ab"], pair, pair, none.to_sparse()],
    ]
    others = [
        {
            text(word): torch.ones(2),
            text("name"): text(word),
            "rates": [(0.5, text("cpu")), (0.5, text("cpu"))],
            "where": [text("cpu"), text("storage")],
            "part": torch.tensor([7.0, 8.0]),
        },
        [
            {text("norm"), text("bias"), text(word)},
            [text(word), text(word), bytes([97, 98]), bytes([97, 98])],
            (0.5, "cpu"),
            (0.5, text("cpu")),
            torch.zeros(0).to_sparse(),
        ],
    ]
    digests = [stored(value, tmp_path).digest for value in [*ones, *others]]
    assert digests[:2] == digests[2:]
    program = f"""
import torch
from rankzero import ResultRef
print(ResultRef.save([{{"weight", "bias", "norm"}}, {{"a": torch.ones(2).to_sparse()}}], {str(tmp_path)!r}).digest)
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_a_set_twice_is_one(tmp_path: Path) -> None:
    names = {"a", "b"}
    first, second, other = stored([names, names, {"a", "b"}], tmp_path).load()
    assert first is second
    assert first is not other
    assert first == other == names


def test_a_module_is_pickled_and_described(tmp_path: Path) -> None:
    ref = stored(torch.nn.Linear(3, 2), tmp_path)
    assert ref.summary == {"type": "torch.nn.modules.linear.Linear"}
    assert isinstance(ref.load(), torch.nn.Linear)


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
    for damaged in (data, data[:-1]):
        Path(ref.uri).write_bytes(damaged)
        # The kernel's own times have ticks of some milliseconds.
        os.utime(ref.uri, (1, 1))
        with pytest.raises(ResultError, match="changed or damaged"):
            ref.load()


def test_tensors_that_nobody_touched_are_not_read_for_their_checksum(tmp_path: Path) -> None:
    ref = ResultRef.from_json(json.loads(json.dumps(stored({"x": torch.ones(3)}, tmp_path).to_json())))
    other = dataclasses.replace(ref, digest=stored([1], tmp_path).digest)
    assert torch.equal(other.load()["x"], torch.ones(3))
    os.utime(ref.uri, (1, 1))
    assert torch.equal(ref.load()["x"], torch.ones(3))
    with pytest.raises(ResultError, match="changed or damaged"):
        other.load()
    with pytest.raises(ResultError, match="changed or damaged"):
        dataclasses.replace(stored({1, 2}, tmp_path), digest=ref.digest).load()


def test_a_disk_that_is_full_is_named() -> None:
    with pytest.raises(OSError, match="No space left"):
        formats.write({"x": torch.zeros(8 << 20)}, "torch", "/dev/full")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    ref = stored([1], tmp_path)
    Path(ref.uri).unlink()
    with pytest.raises(ResultError, match="does not exist"):
        ref.load()


def test_a_value_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="of type generator cannot be pickled"):
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


def test_the_digest_is_what_sha256sum_prints_of_the_file_or_its_blocks(tmp_path: Path) -> None:
    for value in ([1, 2], {1, 2}, {"x": torch.arange(3 << 20), "y": torch.ones(3)}, [np.arange(3 << 20), {1}]):
        ref = stored(value, tmp_path)
        data = Path(ref.uri).read_bytes()
        blocks = [hashlib.sha256(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK)]
        joined = hashlib.sha256(b"".join(block.digest() for block in blocks)).hexdigest()
        assert ref.digest == (f"sha256-4m:{joined}" if len(blocks) > 1 else f"sha256:{blocks[0].hexdigest()}")
        assert ref.digest == digest_of([data[:1000], memoryview(data)[1000:]])


def test_saving_twice_keeps_one_file(tmp_path: Path) -> None:
    assert stored([1, 2], tmp_path) == stored([1, 2], tmp_path)
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_references_are_replaced_deep_inside_and_containers_are_copied_once_each() -> None:
    ref, kept = ResultRef("/x", "json", "0", 1), {"plain": [1, (2,)]}
    twice, loop = [ref], [ref]  # type: list[Any], list[Any]
    loop.append((loop, {"back": loop}))
    mapped = map_refs({"a": twice, "b": (twice, kept, ref), "loop": loop}, lambda r: [r.uri])
    assert mapped["a"] == [["/x"]]
    assert mapped["a"] is mapped["b"][0]
    assert mapped["b"][2] is mapped["a"][0], "a reference that is given twice is opened once"
    assert mapped["loop"][1][0] is mapped["loop"] is mapped["loop"][1][1]["back"]
    assert twice == [ref]
