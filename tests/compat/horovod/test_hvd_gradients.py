"""What `DistributedOptimizer` reduces: every kind of gradient, in the order in which users call things."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path)


def test_gradients_of_every_layout_and_type(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        layouts = (torch.channels_last, torch.contiguous_format)
        parts = {
            # Of another layout on each rank.
            "channels_last": torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=layouts[rank]),
            "large": (torch.arange(2.0**19) % 512).view(4, 2, 256, 256).to(memory_format=layouts[rank]),
            "scalar": torch.tensor(1.0),
            "empty": torch.empty(0, 3),
            "complex": torch.ones(40, dtype=torch.complex64),
            "bfloat16": torch.ones(40, dtype=torch.bfloat16),
            "float64": torch.ones(40, dtype=torch.float64),
        }
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            for passes in (1, 2):
                named = {name: torch.nn.Parameter(part.detach().clone()) for name, part in parts.items()}
                optimizer = torch.optim.SGD(named.values(), lr=0.1)
                optimizer = hvd.DistributedOptimizer(
                    optimizer, named.items(), compression=compression, backward_passes_per_step=passes
                )
                for parameter in named.values():
                    parameter.grad = torch.zeros_like(parameter)
                before = {name: parameter.grad for name, parameter in named.items()}
                for _ in range(passes):
                    sum((named[name] * parts[name] * (rank + 1)).sum().abs() for name in named).backward()
                optimizer.step()
                for name, parameter in named.items():
                    assert parameter.grad is before[name], "the tensor that others may hold"
                    assert parameter.grad.stride() == parameter.stride()
                    torch.testing.assert_close(parameter.grad, parts[name] * 1.5 * passes)
        return True

    assert launcher.run(train)


def test_a_sum_beyond_float16_is_divided_before(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()

        def gradient(numel: int, factor: float) -> Any:
            parameter = torch.nn.Parameter(torch.zeros(numel))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=0.1), compression=hvd.Compression.fp16, gradient_predivide_factor=factor
            )
            (parameter * 40_000).sum().backward()
            optimizer.step()
            return parameter.grad.dtype is torch.float32, parameter.grad.unique().item()

        # In the round itself, together with others, alone.
        return [[gradient(numel, factor) for factor in (1.0, 2.0)] for numel in (1, 1000, 2**20)]

    assert launcher.run(train) == [[(True, float("inf")), (True, 40_000.0)]] * 3


def test_models_that_use_parameters_twice(launcher: Launcher) -> None:
    def train() -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        import rankzero.compat.horovod.torch as hvd

        hvd.init()

        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder = torch.nn.Linear(4, 4, bias=False)
                self.decoder = torch.nn.Linear(4, 4, bias=False)
                self.decoder.weight = self.encoder.weight

            def forward(self, x: Any) -> Any:
                return self.decoder(self.encoder(x).relu())

        def gradients(model: Any, xs: Any) -> Any:
            for x in xs:
                (model(x).pow(2).sum() / len(xs)).backward()
            return [parameter.grad for parameter in model.parameters()]

        def batch(rank: int) -> Any:
            return torch.full((2, 4), rank + 1.0)

        class Checkpointed(torch.nn.Module):
            def __init__(self, reentrant: bool) -> None:
                super().__init__()
                self.body, self.reentrant = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), reentrant

            def forward(self, x: Any) -> Any:
                return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)

        for make in (Tied, lambda: Checkpointed(True), lambda: Checkpointed(False)):
            torch.manual_seed(0)
            ours, plain = make(), make()
            plain.load_state_dict(ours.state_dict())
            named = ours.named_parameters(remove_duplicate=False)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), named)
            found = gradients(ours, [batch(hvd.rank())])
            optimizer.synchronize()
            torch.testing.assert_close(found, gradients(plain, [batch(0), batch(1)]))
        return True

    assert launcher.run(train)


def test_what_would_give_wrong_gradients_is_refused(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()

        def made(**options: Any) -> Any:
            parameter = torch.nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            return parameter, hvd.DistributedOptimizer(optimizer, [("weight", parameter)], **options)

        # Between the passes of one step, where what was accumulated would be lost.
        parameter, optimizer = made(backward_passes_per_step=2)
        (parameter * (rank + 1)).sum().backward()
        with pytest.raises(AssertionError, match="between the backward passes"):
            optimizer.zero_grad()
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        assert parameter.grad.tolist() == [3.0] * 3
        optimizer.zero_grad()
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        assert parameter.grad.tolist() == [1.5] * 3, "a step before all passes"
        optimizer.zero_grad()

        # Changed on its way: by clipping, or dropped.
        changes = [
            lambda: torch.nn.utils.clip_grad_norm_([parameter], 0.1),
            lambda: torch.nn.utils.clip_grad_value_([parameter], 0.1),
            lambda: setattr(parameter, "grad", None),
        ]
        for options in ({}, {"compression": hvd.Compression.fp16}):
            for change in changes:
                parameter, optimizer = made(**options)
                (parameter * (rank + 1)).sum().backward()
                change()
                with pytest.raises(AssertionError, match="'weight.*' was changed on its way"):
                    optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.zero_grad()

        parameter, optimizer = made()
        with pytest.raises(AssertionError, match="create_graph"):
            parameter.pow(2).sum().backward(create_graph=True)
        parameter.grad = None

        # Of another shape on each rank: the others are reduced, and the next step is free.
        wrong, right = torch.nn.Parameter(torch.ones(3 + rank)), torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([wrong, right], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, [("wrong", wrong), ("right", right)])
        ((wrong.sum() + right.sum()) * (rank + 1)).backward()
        with pytest.raises(hvd.MismatchError, match=r"gradient.wrong.*rank 0.*\[3\].*rank 1.*\[4\]"):
            optimizer.step()
        assert right.grad.tolist() == [1.5] * 3
        optimizer.zero_grad()

        parameter, optimizer = made(op=hvd.Sum)
        (parameter * (rank + 1)).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="a second time"):
            optimizer.synchronize()
        return parameter.grad.tolist()

    assert launcher.run(train) == [6.0] * 3


def test_groups_are_checked(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        model = torch.nn.Linear(2, 2)
        for groups, reason in [
            (-1, "positive integer"),
            (0, "positive integer"),
            ("all", "positive integer"),
            ([model.weight], "list of lists"),
            ([["weight"]], "torch.Tensor, not str"),
            ([[model.weight], [model.weight]], "only appear once"),
        ]:
            with pytest.raises(ValueError, match=reason):
                hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=groups)
        found = []
        for options in ({"groups": 1}, {"groups": [[model.weight, model.bias]]}, {"num_groups": 2}):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if "num_groups" in options:
                with pytest.warns(DeprecationWarning, match="groups"):
                    optimizer = hvd.DistributedOptimizer(optimizer, **options)
            else:
                optimizer = hvd.DistributedOptimizer(optimizer, **options)
            optimizer.zero_grad()
            (model(torch.full((1, 2), hvd.rank() + 1.0))).sum().backward()
            optimizer.step()
            found.append(model.weight.grad.unique().tolist())
        return found

    assert launcher.run(train) == [[1.5]] * 3


def test_two_models_of_the_same_names(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        one, two = (torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)) for _ in range(2))
        hvd.broadcast_parameters(one.state_dict())
        hvd.broadcast_parameters(two.state_dict())
        optimizers = []
        for model in (one, two):
            plain = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizers.append(hvd.DistributedOptimizer(plain, model.named_parameters()))
            # After which calls without a name are counted anew, but not optimizers.
            hvd.join()
        for _ in range(20):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # The hooks of each rank fire in another order.
            for model, factor in [(one, 1.0), (two, 10.0)][:: 1 if rank == 0 else -1]:
                (model(torch.ones(1, 4)) * factor * (rank + 1)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert one[0].weight.grad.unique().tolist() == [1.5]
            assert two[0].weight.grad.unique().tolist() == [15.0]

        # As a GAN is trained: the generator's loss goes through the discriminator.
        generator, discriminator = one, two
        for _ in range(5):
            optimizers[1].zero_grad()
            (discriminator(generator(torch.ones(1, 4)).detach()) * (rank + 1)).sum().backward()
            optimizers[1].step()
            discriminator.requires_grad_(False)
            optimizers[0].zero_grad()
            (discriminator(generator(torch.ones(1, 4))) * (rank + 1)).sum().backward()
            optimizers[0].step()
            discriminator.requires_grad_(True)
        same = hvd.allgather_object([parameter.tolist() for model in (one, two) for parameter in model.parameters()])
        return same[0] == same[1]

    assert launcher.run(train)


def test_an_overflow_on_one_rank_skips_the_step_on_all(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()

        def trained(*, fused: bool, is_clipped: bool) -> Any:
            model = torch.nn.Linear(4, 2)
            hvd.broadcast_parameters(model.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            moved, gradients = [], []
            for step in range(4):
                before = model.weight.detach().clone()
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.full((3, 4), rank + 1.0)).float().mean()
                overflow = float("inf") if step == 1 and rank == 1 else 1.0
                scaler.scale(loss * overflow).backward()
                if is_clipped:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                scaler.update()
                moved.append(not torch.equal(before, model.weight))
                change = (before - model.weight)[0, 0].item()
                gradients.append(change)
            same = hvd.allgather_object(model.weight.tolist())
            return moved, same[0] == same[1], scaler.get_scale(), gradients[0]

        return [trained(fused=fused, is_clipped=is_clipped) for fused in (False, True) for is_clipped in (False, True)]

    # A weight's gradient is the mean of 1 and 2, by two outputs; times the rate.
    first = pytest.approx(0.075, abs=1e-4)
    assert launcher.run(train) == [([True, False, True, True], True, 512.0, first)] * 4


def test_sparse_gradients(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()

        def made(cls: Any, **options: Any) -> Any:
            torch.manual_seed(0)
            model = torch.nn.Embedding(6, 2, sparse=True)
            optimizer = cls(list(model.parameters()), lr=0.1)
            return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

        def expected(cls: Any, rows: Any) -> Any:
            model = torch.nn.Embedding(6, 2, sparse=True)
            torch.manual_seed(0)
            model.reset_parameters()
            optimizer = cls(list(model.parameters()), lr=0.1)
            for step in rows:
                optimizer.zero_grad()
                for index, part in enumerate(step):
                    if part is not None:
                        (model(torch.tensor(part, dtype=torch.int64)) * (index + 1) / 2).sum().backward()
                optimizer.step()
            return model.weight

        # Rows of each rank: with duplicates, other numbers of them, none at all, and no backward pass.
        steps = [([0, 0, 3], [3, 5]), ([1], []), ([], []), (None, [2, 2]), ([4], None)]
        for cls in (torch.optim.SparseAdam, torch.optim.SGD):
            for options in (
                {},
                {"sparse_as_dense": True},
                {"compression": hvd.Compression.fp16},
                {"sparse_as_dense": True, "compression": hvd.Compression.fp16},
            ):
                model, optimizer = made(cls, **options)
                for step in steps:
                    optimizer.zero_grad()
                    if step[rank] is not None:
                        (model(torch.tensor(step[rank], dtype=torch.int64)) * (rank + 1)).sum().backward()
                    optimizer.step()
                    assert model.weight.grad.is_sparse
                torch.testing.assert_close(model.weight, expected(cls, steps), msg=f"{cls} {options}")

        # Uncoalesced, with one and two sparse dimensions.
        for dims in (1, 2):
            parameter = torch.nn.Parameter(torch.zeros(4, 3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
            part = torch.eye(4, 3).to_sparse(dims)
            parameter.grad = part + part if rank else part
            optimizer.step()
            assert torch.equal(parameter, -3 * torch.eye(4, 3))
        return True

    assert launcher.run(train)
