"""Models in parallel: the same weights as one process would get, gathered whole and loaded again."""

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
        weights, moments = rt.full_state_dict(model), rt.full_optimizer_state_dict(model, optimizer)
        assert bool(weights) == bool(moments) == (rank == 0)

        again = rt.prepare_model(build(7), strategy)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.9)
        # A checkpoint gives every rank the whole state; `full_state_dict` gives it to rank 0 alone.
        weights, moments = rt.broadcast_object((weights, moments)) if on_every_rank else (weights, moments)
        given = list(weights), {name: list(part) for name, part in moments.items()}
        rt.load_full_state_dict(again, weights)
        rt.load_full_optimizer_state_dict(again, optimizer, moments)
        assert given == (list(weights), {name: list(part) for name, part in moments.items()}), "they stay as they were"
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
        weights, moments = rt.full_state_dict(model), rt.full_optimizer_state_dict(model, optimizer).get("state")
        before = copy.deepcopy((weights, moments))
        step(model, optimizer, torch.ones(1, 4, 2))
        if weights:
            torch.testing.assert_close((weights, moments), before, rtol=0, atol=0)
        return [weights[name].data_ptr() for name in ("0.weight", "2.weight")] if weights else None

    tied = launcher.run(train)
    assert strategy == "fsdp" or tied[0] == tied[1]


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
    assert re.search(r"0\.weight.* shape .*\[1, 3\]", narrow)
    assert "the weights lack '0.weight'" in renamed


OPTIMIZERS = [
    kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    # These two refuse the step by which torch makes the tensors that it loads into.
    if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.fixture
def own_group() -> Iterator[None]:
    """Ends the group of one rank that loading makes in this process: later tests make groups of their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_state_of_any_optimizer_continues_where_it_was(own_group: None, kind: Any, steps: int) -> None:
    def trained(rate: float, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        # Muon takes matrices only.
        model = nn.Linear(4, 2, bias=False)
        optimizer = kind(model.parameters(), lr=rate)
        advance(model, optimizer, steps)
        return model, optimizer

    def advance(model: nn.Module, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
        for number in range(1, steps + 1):
            (model(torch.arange(4.0).reshape(1, 4) * number) - 1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    plain, saved, again = trained(0.1, steps), trained(0.1, steps), trained(0.7, 0)
    rt.load_full_optimizer_state_dict(*again, rt.full_optimizer_state_dict(*saved))
    rt.load_full_state_dict(again[0], rt.full_state_dict(saved[0]))
    expected = advance(*plain, 2)
    for training in (saved, again):
        torch.testing.assert_close(advance(*training, 2), expected, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_settings_of_a_group_are_those_of_its_parameters(own_group: None, steps: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def optimizer(order: list[int], rates: list[float]) -> torch.optim.Optimizer:
        groups = [{"params": model[index].parameters(), "lr": rates[index]} for index in order]
        return torch.optim.Adam(groups)

    saved, other = optimizer([0, 1], [0.5, 0.25]), optimizer([1, 0], [0.1, 0.1])
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        saved.step()
    rt.load_full_optimizer_state_dict(model, other, rt.full_optimizer_state_dict(model, saved))
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]


def test_a_parameter_without_a_gradient_has_no_state(own_group: None) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    saved, again = (torch.optim.Adam(model.parameters()) for _ in range(2))
    model[0](torch.ones(1, 2)).sum().backward()
    saved.step()
    rt.load_full_optimizer_state_dict(model, again, rt.full_optimizer_state_dict(model, saved))
    assert set(again.state) == set(saved.state) == set(model[0].parameters())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_state_of_another_optimizer_is_refused_on_every_rank(launcher: Launcher, strategy: Any) -> None:
    def train() -> list[Any]:
        import torch

        import rankzero.train as rt

        def made(width: int, parts: int = 1, groups: int = 1) -> Any:
            layers = [torch.nn.Linear(3, width)] + [torch.nn.Linear(width, width) for _ in range(parts - 1)]
            model = rt.prepare_model(torch.nn.Sequential(*layers), strategy)
            parameters = list(model.parameters())
            optimizer = torch.optim.AdamW([{"params": parameters[n::groups]} for n in range(groups)])
            step(model, optimizer, torch.ones(1, 4, 3))
            return model, optimizer

        found = []
        for saved in (made(2), made(4, parts=2), made(4, groups=2)):
            with pytest.raises(RuntimeError) as caught:
                rt.load_full_optimizer_state_dict(*made(4), rt.full_optimizer_state_dict(*saved))
            found.append(str(caught.value))
        return rt.all_gather_object(found)

    first, second = launcher.run(train)
    assert first == second
    for message, expected in zip(first, ["'0.weight' has the shape", "no '1.weight'", "'param_groups'"], strict=True):
        assert expected in message


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
