"""What lies beside the sharded tensors of a checkpoint."""

from collections import OrderedDict

import pytest
import torch
from tests.kinds_of_values import same

import rankzero.train as rt
from rankzero import ResultError
from rankzero.testing import run_inline
from rankzero.values.sharded import load, split


def test_what_is_not_sharded_comes_back_with_its_types_and_fills_a_target() -> None:
    state = OrderedDict(
        optimizer={"state": {0: {"step": torch.tensor(3.0)}}, 1: (torch.ones(1), [None])},
        more=[torch.tensor([True]), torch.empty(0, 3), torch.ones(3).to(torch.float8_e4m3fn), (0.5, ["a"])],
        none={},
    )
    part = split(state)
    target = {"optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, 1: (torch.zeros(1),)}}
    whole, filled = load(0, [], lambda _: part), load(0, [], lambda _: part, target)
    assert same(whole, state)
    assert same(filled, OrderedDict(optimizer=state["optimizer"], none={}))
    assert filled["optimizer"]["state"][0]["step"] is target["optimizer"]["state"][0]["step"]  # type: ignore[index]


def test_tensors_that_a_checkpoint_lacks_are_named_and_nothing_is_filled() -> None:
    def train() -> None:
        checkpoint = rt.get_checkpoint()
        assert checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        before = model[0].weight.clone()
        with pytest.raises(ResultError, match=r"'model\.1\.weight' has the shape None in the checkpoint, and \[2, 2\]"):
            checkpoint.load(into={"model": model.state_dict()})
        with pytest.raises(ResultError, match="'ema' has the shape None"):
            checkpoint.load(into={"ema": torch.zeros(2)})
        assert torch.equal(model[0].weight, before)
        # Values that are not filled are no error.
        filled = checkpoint.load(into={"model": model[:1].state_dict(), "steps": 0})
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        assert filled["epoch"] == 3

    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    run_inline(train, checkpoint={"model": weights, "epoch": 3})
