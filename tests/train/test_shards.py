"""What lies beside the sharded tensors of a checkpoint."""

import io
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch

import rankzero.train as rt
from rankzero import ResultError
from rankzero.testing import run_inline
from rankzero.values.sharded import ShardedState, fill, write_to


def write(state: Any) -> tuple[bytes, dict[str, Any]]:
    file = io.BytesIO()
    facts = write_to(state, file)
    return file.getvalue(), facts


def read(written: tuple[bytes, dict[str, Any]]) -> Any:
    data, facts = written
    with ShardedState("0", {"0": facts}, {"0": facts["pieces"].encode()}, lambda _: io.BytesIO(data)) as state:
        return state.load()


def test_plain_tensors_and_values_come_back() -> None:
    state = {
        "bits": torch.tensor([True, False]),
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "rates": (0.5, ["a", None]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = read(write(state))
    assert (found["bits"].tolist(), found["number"].item(), found["none"].shape) == ([True, False], 7, (0, 3))
    assert found["rates"] == (0.5, ["a", None])
    assert found["float8"].dtype == torch.float8_e4m3fn
    assert found["float8"].float().tolist() == [1.0, 1.0, 1.0]
    assert found["uint16"].dtype == torch.uint16
    assert found["uint16"].tolist() == [1, 65535]
    assert found["parameter"].tolist() == [1.0, 1.0]


def test_containers_keep_their_types_and_keys() -> None:
    state = OrderedDict(optimizer={"state": {0: {"step": torch.tensor(3.0)}}, 1: (torch.ones(1), [None])}, none={})
    filled = fill({"optimizer": {"state": {0: {"step": torch.tensor(0.0)}}}}, state)
    for found in (read(write(state)), filled):
        assert type(found) is OrderedDict
        assert list(found) == ["optimizer", "none"]
        assert float(found["optimizer"]["state"][0]["step"]) == 3.0
        assert type(found["optimizer"][1]) is tuple
        assert (found["optimizer"][1][1], found["none"]) == ([None], {})
    with pytest.raises(ResultError, match=r"two tensors of a checkpoint have the name 'a\.b'"):
        write({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_of_a_view_only_what_it_shows_is_written() -> None:
    whole = torch.arange(1 << 20)
    written = write({"w": whole[:4], "same": whole[2:6]})
    assert len(written[0]) < 10_000
    assert read(written)["same"].tolist() == [2, 3, 4, 5]


def test_what_cannot_be_read_back_is_refused_when_it_is_written() -> None:
    class TwoWords(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} {two}")

    with pytest.raises(ResultError, match="cannot be read back: TypeError"):
        write({"error": TwoWords("a", "b")})


def test_what_cannot_be_loaded_elsewhere_is_a_result_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_there")
    module.Thing = type("Thing", (), {"__module__": "only_there"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_there", module)
    written = write({"thing": module.Thing()})
    monkeypatch.delitem(sys.modules, "only_there")
    with pytest.raises(ResultError, match="what rank 0 wrote .* cannot be loaded here: ModuleNotFoundError"):
        read(written)


def test_tensors_that_a_checkpoint_lacks_are_named_and_nothing_is_filled() -> None:
    def train() -> None:
        checkpoint = rt.get_checkpoint()
        assert checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        before = model[0].weight.clone()
        with pytest.raises(ResultError, match=r"Missing key .*: model\.1\.weight\. Give"):
            checkpoint.load(into={"model": model.state_dict()})
        with pytest.raises(ResultError, match="Missing key .*: ema"):
            checkpoint.load(into={"ema": torch.zeros(2)})
        assert torch.equal(model[0].weight, before)
        # What the checkpoint has beside them is no error, and neither are values that are not filled.
        filled = checkpoint.load(into={"model": model[:1].state_dict(), "steps": 0})
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        assert filled["epoch"] == 3

    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    run_inline(train, checkpoint={"model": weights, "epoch": 3})
