"""Models in parallel: the same weights as one process would get, gathered whole and loaded again."""

import copy
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
    for batch in batches:
        model(batch).pow(2).mean().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
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


@pytest.mark.parametrize(
    ("strategy", "on_every_rank"),
    [
        ("ddp", False),
        pytest.param("ddp", True, marks=pytest.mark.soak),
        pytest.param("fsdp", False, marks=pytest.mark.soak),
        ("fsdp", True),
    ],
)
def test_two_ranks_train_as_one_would_and_go_on_from_the_whole_state(
    launcher: Launcher, strategy: Any, on_every_rank: bool
) -> None:
    def train() -> Any:
        import torch

        import rankzero.train as rt

        rank = rt.get_context().rank
        # Every rank has weights of its own: those of rank 0 count.
        model = rt.prepare_model(build(rank), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        first, second = rows()[:, rank * 4 : rank * 4 + 4].split(2)
        step(model, optimizer, first, clip=0.1)
        weights, moments = rt.full_state_dict(model), optimizer.state_dict()
        assert bool(weights) == (rank == 0)

        again = rt.prepare_model(build(7), strategy)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.9)
        # A checkpoint gives every rank the whole state; `full_state_dict` gives it to rank 0 alone.
        weights = rt.broadcast_object(weights) if on_every_rank else weights
        given = list(weights)
        rt.load_full_state_dict(again, weights)
        optimizer.load_state_dict(moments)
        assert given == list(weights), "they stay as they were"
        step(again, optimizer, second, clip=0.1)
        return rt.full_state_dict(again)

    found = launcher.run(train)

    assert list(found) == list(alone()), "by the names of the plain module"
    for name, expected in alone().items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_whole_states_are_copies_that_later_steps_do_not_change(launcher: Launcher, strategy: Any) -> None:
    def train() -> Any:
        import torch

        import rankzero.train as rt

        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        module[2].weight = module[0].weight
        model = rt.prepare_model(module, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        step(model, optimizer, torch.ones(1, 4, 2))
        weights = rt.full_state_dict(model)
        before = copy.deepcopy(weights)
        step(model, optimizer, torch.ones(1, 4, 2))
        if weights:
            torch.testing.assert_close(weights, before, rtol=0, atol=0)
        return [weights[name].data_ptr() for name in ("0.weight", "2.weight")] if weights else None

    tied = launcher.run(train)
    assert strategy == "fsdp" or tied[0] == tied[1]


def test_a_sparse_buffer_is_copied_like_the_others() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    copied = rt.full_state_dict(model)["mask"]
    model.mask.zero_()
    assert torch.equal(copied.to_dense(), torch.eye(2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_of_other_names_and_shapes_are_refused_on_every_rank(launcher: Launcher, strategy: Any) -> None:
    def train() -> list[str]:
        import torch

        import rankzero.train as rt

        narrow, model = (rt.prepare_model(torch.nn.Sequential(torch.nn.Linear(3, width)), strategy) for width in (1, 4))
        renamed = {f"module.{name}": value for name, value in rt.full_state_dict(model).items()}
        errors = []
        for state in (rt.full_state_dict(narrow), renamed):
            with pytest.raises(RuntimeError) as caught:
                rt.load_full_state_dict(model, state)
            errors.append(str(caught.value))
        return errors

    narrow, renamed = launcher.run(train)
    assert "'0.weight' has the shape [1, 3], and [4, 3] in the model" in narrow
    assert "'0.weight' has the shape None, and [4, 3] in the model" in renamed


def test_units_are_sharded_apart_and_compute_in_their_type(launcher: Launcher) -> None:
    def train() -> Any:
        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

        import rankzero.train as rt

        def sharded(**kwargs: Any) -> list[str]:
            model = rt.prepare_model(build(0), "fsdp", **kwargs)
            return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        half = rt.prepare_model(build(0), "fsdp", mp_policy=policy)
        return {
            "members of lists": sharded(),
            "classes": sharded(units=[torch.nn.Linear]),
            "none": sharded(units=[]),
            "types": [str(half(torch.ones(1, 6)).dtype), str(next(half.parameters()).dtype)],
        }

    assert launcher.run(train) == {
        "members of lists": ["", "blocks.0", "blocks.1"],
        "classes": ["", "blocks.0", "blocks.1", "head"],
        "none": [""],
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: rt.prepare_model(model, "zero"), "'ddp', 'fsdp' or None"),
        (lambda model: rt.prepare_model(model, units=[nn.Linear]), "belongs to strategy='fsdp'"),
        (lambda model: rt.prepare_model(nn.DataParallel(model)), "wrapped already, in DataParallel"),
    ],
)
def test_what_it_cannot_do_is_refused(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(nn.Linear(1, 1))
