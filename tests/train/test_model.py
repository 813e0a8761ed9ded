"""Models in parallel: the same weights as one process would get, gathered whole and loaded again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankzero.train as rt
from rankzero import Launcher, ResultError


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=str(tmp_path / "runs"))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.relu(block(x))
            return self.head(x)

    return Net()


def rows() -> torch.Tensor:
    return torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5))


def step(model: nn.Module, optimizer: Any, batches: torch.Tensor, clip: float | None = None) -> None:
    """One optimizer step over some batches, whose gradients add up."""
    for index, batch in enumerate(batches):
        with rt.accumulate(model, sync=index == len(batches) - 1):
            model(batch).pow(2).mean().backward()
    if clip:
        rt.clip_grad_norm(model, clip)
    optimizer.step()
    optimizer.zero_grad()


def alone() -> dict[str, torch.Tensor]:
    """Two steps of one process, with the mean of what two ranks see."""
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batches in rows().split(2):
        for batch in batches.split(1):
            (model(batch[0][:4]).pow(2).mean() / 2 + model(batch[0][4:]).pow(2).mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_would_and_go_on_from_the_whole_state(launcher: Launcher, strategy: Any) -> None:
    def train() -> Any:
        import torch

        import rankzero.train as rt

        rank = rt.get_context().rank
        # Every rank has weights of its own: those of rank 0 count.
        model = rt.prepare_model(build(rank), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        first, second = rows()[:, rank * 4 : rank * 4 + 4].split(2)
        step(model, optimizer, first, clip=0.1)
        weights, moments = rt.full_state_dict(model), rt.full_optimizer_state_dict(model, optimizer)
        assert bool(weights) == bool(moments) == (rank == 0)

        again = rt.prepare_model(build(7), strategy)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.9)
        rt.load_full_state_dict(again, weights)
        rt.load_full_optimizer_state_dict(again, optimizer, moments)
        step(again, optimizer, second, clip=0.1)
        return rt.full_state_dict(again)

    found = launcher.run(train)

    assert list(found) == list(alone()), "by the names of the plain module"
    for name, expected in alone().items():
        torch.testing.assert_close(found[name], expected)


def test_units_are_sharded_apart_and_compute_in_their_type(launcher: Launcher) -> None:
    def train() -> Any:
        import torch
        from torch.distributed.fsdp import FSDPModule

        import rankzero.train as rt

        def sharded(**kwargs: Any) -> list[str]:
            model = rt.prepare_model(build(0), "fsdp", **kwargs)
            return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

        half = rt.prepare_model(build(0), "fsdp", mixed_precision=torch.bfloat16)
        return {
            "members of lists": sharded(),
            "classes": sharded(units=[torch.nn.Linear]),
            "test": sharded(units=lambda module: False),
            "types": [str(half(torch.ones(1, 6)).dtype), str(next(half.parameters()).dtype)],
        }

    assert launcher.run(train) == {
        "members of lists": ["", "blocks.0", "blocks.1"],
        "classes": ["", "blocks.0", "blocks.1", "head"],
        "test": [""],
        "types": ["torch.bfloat16", "torch.float32"],
    }


def test_a_part_of_a_model_is_no_result(launcher: Launcher) -> None:
    def train() -> Any:
        import rankzero.train as rt

        return rt.prepare_model(build(0), "fsdp").state_dict()

    with pytest.raises(ResultError, match="holds a DTensor, of which this rank has only its part.*full_state_dict"):
        launcher.run(train)


def test_a_frozen_model_and_no_strategy_are_only_moved(launcher: Launcher) -> None:
    def train() -> list[str]:
        import rankzero.train as rt

        frozen = build(0).requires_grad_(False)
        return [type(model).__name__ for model in (rt.prepare_model(frozen), rt.prepare_model(build(0), None))]

    assert launcher.run(train) == ["Net", "Net"]


def test_float16_is_scaled_and_bfloat16_is_not() -> None:
    assert rt.grad_scaler(torch.float16).is_enabled()
    assert not rt.grad_scaler().is_enabled()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: rt.prepare_model(model, "zero"), "'ddp', 'fsdp' or None"),
        (lambda model: rt.prepare_model(model, mixed_precision=torch.bfloat16), "rt.autocast"),
        (lambda model: rt.prepare_model(nn.DataParallel(model)), "wrapped already, in DataParallel"),
    ],
)
def test_what_it_cannot_do_is_refused(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(nn.Linear(1, 1))
