"""What lies beside the sharded tensors of a checkpoint."""

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rankzero.train as rt
from rankzero import ResultError
from rankzero.testing import run_inline
from rankzero.values import shards
from rankzero.values.resharding import ShardedState


def write(state: Any) -> tuple[bytes, dict[str, Any]]:
    file = io.BytesIO()
    size, sha256, _ = shards.write_to(state, file)
    return file.getvalue(), {"0": {"size": size, "sha256": sha256}}


def read(written: tuple[bytes, dict[str, Any]], folder: Path) -> Any:
    (folder / "part").write_bytes(written[0])
    with ShardedState(written[1], lambda _: open(folder / "part", "rb")) as state:
        return state.load("0")


def test_plain_tensors_of_all_types_come_back(tmp_path: Path) -> None:
    state = {
        "sharded": shards.Pieces([4], torch.float32, [([0], torch.arange(4.0))]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = read(write(state), tmp_path)
    assert found["sharded"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["float8"].dtype == torch.float8_e4m3fn
    assert found["float8"].float().tolist() == [1.0, 1.0, 1.0]
    assert found["uint16"].dtype == torch.uint16
    assert found["uint16"].tolist() == [1, 65535]
    assert type(found["parameter"]) is torch.nn.Parameter


def test_of_a_view_only_what_it_shows_is_written(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 20)
    written = write({"w": whole[:4], "same": whole[2:6]})
    assert len(written[0]) < 10_000
    found = read(written, tmp_path)
    found["w"][2] = 1.0
    assert found["same"].tolist() == [1.0, 0.0, 0.0, 0.0]


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_what_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(ResultError, match="not be read back: ValueError: .*'no number'"):
        write({"w": Unreadable()})


def test_what_cannot_be_loaded_elsewhere_is_a_result_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_there")
    module.Thing = type("Thing", (), {"__module__": "only_there"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_there", module)
    written = write({"thing": module.Thing()})
    monkeypatch.delitem(sys.modules, "only_there")
    with pytest.raises(ResultError, match="what rank 0 wrote is whole, but cannot be loaded here: ModuleNotFoundError"):
        read(written, tmp_path)


def test_tensors_that_a_checkpoint_lacks_are_named_and_nothing_is_filled() -> None:
    def train() -> None:
        checkpoint = rt.get_checkpoint()
        assert checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        before = model[0].weight.clone()
        with pytest.raises(ResultError, match=r"lacks 2 of the 4 tensors.*: 'model\.1\.weight', 'model\.1\.bias'"):
            checkpoint.load(into={"model": model.state_dict()})
        with pytest.raises(ResultError, match="lacks 1 of the 1 tensors.*: 'ema'"):
            checkpoint.load(into={"ema": torch.zeros(2)})
        assert torch.equal(model[0].weight, before)
        # What the checkpoint has beside them is no error, and neither are values that are not filled.
        filled = checkpoint.load(into={"model": model[:1].state_dict(), "steps": 0})
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        assert filled["epoch"] == 3

    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    run_inline(train, checkpoint={"model": weights, "epoch": 3})
