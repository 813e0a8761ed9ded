"""The whole state of an optimizer: saving it changes nothing, whatever the optimizer and before its first step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankzero.train as rt

OPTIMIZERS = [
    optimizer
    for _, optimizer in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(optimizer, torch.optim.Optimizer) and optimizer is not torch.optim.Optimizer
]
NOT_LOADED_BY_TORCH = {"LBFGS", "SparseAdam"}
"""Optimizers that refuse the step by which torch makes the tensors that it loads into."""


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Ends the group of one rank that loading makes in this process: later tests make groups of their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class _Training:
    def __init__(self, kind: Any, rate: float = 0.1) -> None:
        torch.manual_seed(0)
        self.is_sparse = kind is torch.optim.SparseAdam
        # Muon takes matrices only.
        layer = nn.Embedding(4, 2, sparse=True) if self.is_sparse else nn.Linear(4, 2, bias=False)
        self.model = nn.Sequential(layer)
        self.optimizer = kind(self.model.parameters(), lr=rate)
        self.calls = 0
        self.optimizer.register_step_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def step(self, steps: int) -> dict[str, torch.Tensor]:
        for number in range(1, steps + 1):
            given = torch.tensor([0, 2]) if self.is_sparse else torch.arange(4.0).reshape(1, 4) * number

            def closure(given: torch.Tensor = given) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = (self.model(given) - 1).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            self.optimizer.step(closure)
        return self.model.state_dict()

    def save(self) -> dict[str, Any]:
        return rt.full_optimizer_state_dict(self.model, self.optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_state_of_before_the_first_step_changes_nothing_and_can_be_loaded(kind: Any) -> None:
    plain, saved, other = _Training(kind), _Training(kind), _Training(kind, rate=0.7)
    state = saved.save()
    assert (saved.calls, [parameter.grad for parameter in saved.model.parameters()]) == (0, [None])
    rt.load_full_optimizer_state_dict(other.model, other.optimizer, state)
    expected = plain.step(3)
    for training in (saved, other):
        torch.testing.assert_close(training.step(3), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in OPTIMIZERS if kind.__name__ not in NOT_LOADED_BY_TORCH],
    ids=lambda kind: kind.__name__,
)
def test_a_state_of_any_optimizer_goes_on_where_it_was(kind: Any) -> None:
    plain, saved, again = _Training(kind), _Training(kind), _Training(kind)
    plain.step(2)
    again.model.load_state_dict(saved.step(2))
    rt.load_full_optimizer_state_dict(again.model, again.optimizer, saved.save())
    expected = plain.step(2)
    for training in (saved, again):
        torch.testing.assert_close(training.step(2), expected, rtol=0, atol=0)


def test_a_state_without_tensors_has_the_settings_of_each_group_of_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def optimizer(order: list[int], rates: list[float]) -> torch.optim.Optimizer:
        groups = [{"params": model[index].parameters(), "lr": rates[index]} for index in order]
        return torch.optim.Adam(groups)

    rates = [torch.tensor(0.5), 0.25]
    state = rt.full_optimizer_state_dict(model, optimizer([0, 1], rates))  # type: ignore[arg-type]
    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    other = optimizer([1, 0], [0.1, 0.1])
    rt.load_full_optimizer_state_dict(model, other, state)
    assert [float(group["lr"]) for group in other.param_groups] == [0.25, 0.5]
    rates[0].fill_(0.0)  # type: ignore[union-attr]
    assert float(other.param_groups[1]["lr"]) == 0.5
    with pytest.raises(KeyError, match="that the model does not have"):
        rt.full_optimizer_state_dict(model[0], optimizer([0, 1], [0.1, 0.1]))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([[2, 3]], KeyError, "does not train the parameters"),
        ([[0, 1, 2, 3]], ValueError, r"groups of \[4\] parameters are not those of its state, of \[2, 2\]"),
        ([[0], [1], [2, 3]], ValueError, "group the parameters as before"),
        ([[0, 2], [1, 3]], ValueError, "group the parameters as before"),
        ([[2, 3], [0, 1]], None, ""),
    ],
)
def test_parameters_in_other_groups_are_refused(steps: int, groups: Any, error: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def optimizer(members: list[list[int]]) -> torch.optim.Optimizer:
        own = list(model.parameters())
        return torch.optim.Adam([{"params": [own[index] for index in group], "lr": group[0] + 1} for group in members])

    saved, other = optimizer([[0, 1], [2, 3]]), optimizer(groups)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        saved.step()
    state = rt.full_optimizer_state_dict(model, saved)
    is_lost = error is KeyError and not steps
    with pytest.raises(error, match=message) if error and not is_lost else contextlib.nullcontext():
        rt.load_full_optimizer_state_dict(model, other, state)
    if not error:
        assert [group["lr"] for group in other.param_groups] == [3, 1]
