"""`DistributedOptimizer` steps as one process with the batches of all ranks does, for every optimizer and gradient."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankzero.compat.horovod.torch as hvd
from rankzero import Launcher


def kinds() -> dict[str, Callable[[Any], Any]]:
    """Every class of torch.optim but SparseAdam, and L-BFGS, which needs a closure, and options of them."""
    classes = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    named = {name: functools.partial(cls, lr=0.1) for name, cls in classes.items()}
    del named["Optimizer"], named["SparseAdam"], named["LBFGS"]
    return {
        **named,
        "fused": functools.partial(torch.optim.Adam, lr=0.1, fused=True),
        "tensor lr": functools.partial(torch.optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
    }


def loss_of(parameters: Any, rank: int) -> Any:
    return sum(((parameter - rank) ** 2 * (index + 1)).sum() for index, parameter in enumerate(parameters))


def every_optimizer() -> None:
    def parameters() -> Any:
        return [torch.nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64)) for shape in ((3, 2), (2, 2))]

    for name, make in kinds().items():
        ours, plain = parameters(), parameters()
        wrapped = hvd.DistributedOptimizer(make(ours), [(str(index), one) for index, one in enumerate(ours)])
        sides = (wrapped, ours, [hvd.rank()]), (make(plain), plain, [0, 1])
        for optimizer, given, ranks in sides * 3:
            optimizer.zero_grad()
            (sum(loss_of(given, rank) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
        for mine, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9, msg=name)

        # Rank 1's state, also in an optimizer that has none yet.
        later = wrapped if hvd.rank() == 1 else make(parameters())
        hvd.broadcast_optimizer_state(later, root_rank=1)
        states = hvd.allgather_object(later.state_dict())
        # torch loads floats in the type of their parameter.
        torch.testing.assert_close(states[0], states[1], rtol=1e-6, atol=0, check_dtype=False, msg=name)


def schedulers_and_hooks() -> None:
    warnings.simplefilter("error")
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(parameter.grad.tolist()))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer = hvd.DistributedOptimizer(optimizer, [("p", parameter)])
    for _ in range(2):
        optimizer.zero_grad()
        (parameter.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [[1.5] * 3, "after"] * 2, "once for each step, with the mean of 1 and 2"
    assert parameter.tolist() == [-1.5 - 0.75] * 3
    assert optimizer.param_groups[0]["lr"] == 0.25
    warnings.resetwarnings()


def parameters_that_come_later() -> None:
    import copy
    import pickle

    rank = hvd.rank()
    model: Any = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(3)])
    hvd.broadcast_parameters(model.state_dict())
    thawed, added, stranger = model[1].weight, model[2].weight, torch.nn.Parameter(torch.zeros(2))
    thawed.requires_grad_(False)
    optimizer: Any = torch.optim.SGD([*model[0].parameters(), thawed], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def gradients(*parameters: Any) -> Any:
        optimizer.zero_grad()
        loss: Any = sum((parameter * (rank + 1)).sum() for parameter in parameters)
        loss.backward()
        optimizer.step()
        return [parameter.grad.unique().tolist() for parameter in parameters]

    first = model[0].weight
    assert gradients(first) == [[1.5]]
    thawed.requires_grad_(True)
    assert gradients(first, thawed) == [[1.5], [1.5]], "frozen when the optimizer was wrapped"
    optimizer.add_param_group({"params": [added]})
    optimizer.add_param_group({"params": [stranger], "lr": 1.0})
    assert gradients(first, added, stranger) == [[1.5], [1.5], [1.5]], "added, with a name and without one"
    # Another optimizer for the same parameters, as for the next phase of a fine-tuning.
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    assert gradients(first, thawed) == [[1.5], [1.5]]
    for of_object in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            of_object(optimizer)


def layouts_types_and_options() -> None:
    layouts = (torch.channels_last, torch.contiguous_format)
    parts = {
        # Of another layout on each rank.
        "channels_last": torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=layouts[hvd.rank()]),
        "large": (torch.arange(2.0**19) % 512).view(4, 2, 256, 256).to(memory_format=layouts[hvd.rank()]),
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.ones(40, dtype=torch.bfloat16),
        "float64": torch.ones(40, dtype=torch.float64),
    }
    fp16 = {"compression": hvd.Compression.fp16}
    for options, factor in [
        ({"gradient_predivide_factor": 4.0}, 1.5),
        ({"op": hvd.Sum, "groups": 2}, 3.0),
        ({"backward_passes_per_step": 2}, 3.0),
        (fp16, 1.5),
    ]:
        named = {name: torch.nn.Parameter(part.detach().clone()) for name, part in parts.items()}
        plain = torch.optim.SGD(named.values(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, named.items(), **options)
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        before = {name: parameter.grad for name, parameter in named.items()}
        for _ in range(options.get("backward_passes_per_step", 1)):
            loss: Any = sum((named[name] * parts[name] * (hvd.rank() + 1)).sum().abs() for name in named)
            loss.backward()
        optimizer.step()
        for name, parameter in named.items():
            assert parameter.grad is before[name], "the tensor that others may hold"
            assert parameter.grad.stride() == parameter.stride()
            torch.testing.assert_close(parameter.grad, parts[name] * factor)


def refused() -> None:
    """What would give wrong gradients is refused, and the next step is free."""
    rank = hvd.rank()

    def made(names: Any = ("weight",), **options: Any) -> Any:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        return parameter, hvd.DistributedOptimizer(optimizer, [(name, parameter) for name in names], **options)

    for names, reason in (([], "lacks the names of 1"), (["w", "w"], "Found duplicates: w")):
        with pytest.raises(ValueError, match=reason):
            made(names)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(made()[1])

    # Between the passes of one step, where what was accumulated would be lost.
    parameter, optimizer = made(backward_passes_per_step=2)
    (parameter * (rank + 1)).sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step=2"):
        optimizer.zero_grad()
    optimizer.step()
    assert parameter.grad.tolist() == [1.5] * 3, "a step before all passes"
    optimizer.zero_grad()
    for is_dropped in (False, True):
        parameter, optimizer = made(compression=hvd.Compression.fp16)
        (parameter * (rank + 1)).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1"):
            parameter.sum().backward()
        torch.nn.utils.clip_grad_norm_([parameter], 0.1)
        if is_dropped:
            parameter.grad = None
        with pytest.raises(AssertionError, match="'weight.*' was changed on its way"):
            optimizer.step()
    # A rollback between the pass and the step.
    parameter, optimizer = made()
    for large in (1 << 22, 1):
        (parameter * (rank + 1) * large).sum().backward()
        if large > 1:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert parameter.grad.tolist() == [1.5] * 3
    with pytest.raises(AssertionError, match="create_graph"):
        (parameter**3).sum().backward(create_graph=True)
    parameter, optimizer = made()
    with pytest.raises(TypeError, match=r"step\(closure\)"):
        optimizer.step(lambda: parameter.sum().backward())
    parameter, optimizer = made(op=hvd.Sum)
    (parameter * (rank + 1)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="a second time"):
        optimizer.synchronize()
    assert parameter.grad.tolist() == [6.0] * 3


def two_models_of_the_same_names() -> None:
    rank = hvd.rank()
    models: list[Any] = [torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)) for _ in range(2)]
    optimizers = []
    for model in models:
        hvd.broadcast_parameters(model.state_dict())
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizers.append(hvd.DistributedOptimizer(plain, model.named_parameters()))
        # After which calls without a name are counted anew, but not optimizers.
        hvd.join()
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The hooks of each rank fire in another order.
        for model, factor in list(zip(models, (1.0, 10.0), strict=True))[:: 1 if rank == 0 else -1]:
            (model(torch.ones(1, 4)) * factor * (rank + 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [model[0].weight.grad.unique().tolist() for model in models] == [[1.5], [15.0]]


def clipped_and_scaled() -> None:
    """Behind `synchronize`: an overflow on rank 1 skips the step of both."""
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.zeros(4))
        plain = torch.optim.SGD([weight], lr=1.0, fused=fused)
        optimizer, scaler = hvd.DistributedOptimizer(plain, [("w", weight)]), torch.amp.GradScaler("cpu", 8.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * (factor if hvd.rank() else 1.0) * (hvd.rank() + 1)).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_([weight], 1.0).item()
            assert norm == 3.0 or factor != 1.0
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert (weight.tolist(), scaler.get_scale()) == (pytest.approx([-1.0] * 4), 4.0)
        scaler.scale(weight.sum()).backward()
        for is_unscaled in (False, True):
            if is_unscaled:
                scaler.unscale_(optimizer)
            with pytest.raises(AssertionError, match="scaler.unscale_.* before optimizer.synchronize"):
                scaler.step(optimizer)
        optimizer.synchronize()


def sparse_gradients() -> None:
    # Rows of each rank: with duplicates, other numbers of them, and none at all.
    steps = [([0, 0, 3], [3, 5]), ([1], []), ([], [])]

    def made() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 2, sparse=True)
        return model, torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    plain, reference = made()
    for step in steps:
        reference.zero_grad()
        for index, part in enumerate(step):
            (plain(torch.tensor(part, dtype=torch.int64)) * (index + 1) / 2).sum().backward()
        reference.step()
    for options in ({}, {"sparse_as_dense": True}, {"compression": hvd.Compression.fp16}):
        model, optimizer = made()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        for step in steps:
            optimizer.zero_grad()
            (model(torch.tensor(step[hvd.rank()], dtype=torch.int64)) * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
        torch.testing.assert_close(model.weight, plain.weight, msg=f"{options}")


def parameters_of_every_kind() -> None:
    rank = hvd.rank()
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    model = model.to(memory_format=torch.channels_last) if rank else model
    model[0].register_buffer("nothing", torch.empty(0, 3))
    model[0].register_buffer("mask", torch.tensor([rank == 1, False]))
    model[0].register_buffer("strided", torch.full((4, 4), float(rank))[::2, ::2])
    model[0].register_buffer("one", torch.full((4,), float(rank))[::2][:1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert model[0].strided.unique().tolist() == model[0].one.tolist() == [1]
    assert model[0].mask.tolist() == [True, False]
    with torch.no_grad():
        model[0].weight.fill_(rank)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    assert bool((model[0].weight == 1).all())
    with pytest.raises(hvd.MismatchError, match=r"parameter.a.*rank 0.*\[2\].*rank 1.*\[3\]"):
        hvd.broadcast_parameters({"a": torch.ones(2 + rank)})


def run_all() -> None:
    hvd.init()
    every_optimizer()
    schedulers_and_hooks()
    parameters_that_come_later()
    layouts_types_and_options()
    refused()
    two_models_of_the_same_names()
    clipped_and_scaled()
    sparse_gradients()
    parameters_of_every_kind()


def test_every_optimizer_and_gradient(tmp_path: Path) -> None:
    Launcher(2, store=tmp_path, env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}).run(run_all)
