"""`DistributedOptimizer`: the losses of plain DDP, Horovod's rules about its calls."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import Launcher

STEPS = 50

CLIPPED = 1.0
"""The norm of accumulated gradients, which some steps have less of, and some more."""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path)


def digits(rank: int, size: int) -> Any:
    """This rank's batches of real digits, in the order of the steps."""
    import importlib.util

    import numpy
    import torch

    # From its file: the import of sklearn takes longer than the training.
    found = importlib.util.find_spec("sklearn")
    assert found
    assert found.submodule_search_locations
    path = f"{found.submodule_search_locations[0]}/datasets/data/digits.csv.gz"
    table = torch.from_numpy(numpy.loadtxt(path, delimiter=",", dtype=numpy.float32, max_rows=STEPS * 16 * size))
    images = table[:, :-1].reshape(-1, 1, 8, 8) / 16
    labels = table[:, -1].long()
    return [
        (images[start + rank * 16 : start + rank * 16 + 16], labels[start + rank * 16 : start + rank * 16 + 16])
        for start in range(0, STEPS * 16 * size, 16 * size)
    ]


def sentences(rank: int, size: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (STEPS, size * 4, 6), generator=generator)
    return [(step[rank * 4 : rank * 4 + 4], step[rank * 4 : rank * 4 + 4, 0] % 3) for step in tokens]


def build(shape: str, sparse: bool) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if shape == "lstm":

        class Lstm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(50, 8, sparse=sparse)
                self.lstm = nn.LSTM(8, 8, batch_first=True)
                self.head = nn.Linear(8, 3)

            def forward(self, x: Any) -> Any:
                return self.head(self.lstm(self.embedding(x))[0][:, -1])

        return Lstm()
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        pytest.param("cnn", 2, marks=pytest.mark.soak),
        ("accumulation", 2),
        ("lstm", 2),
        pytest.param("lstm", 4, marks=pytest.mark.soak),
    ],
)
def test_the_losses_of_plain_ddp(tmp_path: Path, shape: str, size: int) -> None:
    def train() -> Any:
        import torch
        from torch.nn.functional import cross_entropy
        from torch.nn.parallel import DistributedDataParallel

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        batches = sentences(rank, size) if shape == "lstm" else digits(rank, size)
        passes = 2 if shape == "accumulation" else 1

        def losses(model: Any, optimizer: Any, *, ours: bool) -> list[float]:
            found, norms = [], []
            for step, (x, y) in enumerate(batches):
                loss = cross_entropy(model(x), y)
                if ours or (step + 1) % passes == 0:
                    loss.backward()
                else:
                    with model.no_sync():
                        loss.backward()
                if (step + 1) % passes == 0:
                    if ours and passes > 1:
                        optimizer.synchronize()
                    if passes > 1:
                        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)))
                    if ours and passes > 1:
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
            # Of clipped gradients alone the scale does not count.
            assert passes == 1 or min(norms) < CLIPPED < max(norms), norms
            return found

        def make(model: Any) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.01 * size, momentum=0.0 if shape == "lstm" else 0.9)

        model = build(shape, sparse=shape == "lstm")
        optimizer = hvd.DistributedOptimizer(
            make(model), named_parameters=model.named_parameters(), backward_passes_per_step=passes
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        mine = losses(model, optimizer, ours=True)
        plain = DistributedDataParallel(build(shape, sparse=False))
        return mine, losses(plain, make(plain), ours=False)

    mine, plain = Launcher(size, store=tmp_path).run(train)
    assert len(mine) == STEPS
    assert mine == pytest.approx(plain, abs=1e-5)
    assert mine[-1] < mine[0]


def test_horovods_rules(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)})
        plain = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=hvd.Compression.fp16)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        assert optimizer.param_groups is plain.param_groups
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] == 0.2, "options are broadcast, too"

        loss = model["used"](torch.full((1, 2), rank + 1.0)).sum()
        loss.backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.synchronize()
        assert torch.allclose(model["used"].weight.grad, torch.full((1, 2), 1.5)), "the mean of 1 and 2"
        assert torch.equal(model["unused"].weight.grad, torch.zeros(1, 2)), "reduced as zeros"
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
        assert optimizer.param_groups[0]["lr"] == 0.1
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)

        fresh = torch.optim.AdamW(model.parameters(), lr=9.0)
        hvd.broadcast_optimizer_state(optimizer if rank == 0 else fresh, root_rank=0)
        if rank == 1:
            assert fresh.param_groups[0]["lr"] == 0.1
            assert fresh.state[model["used"].weight]["step"].item() == 1.0

        other = torch.nn.Linear(2, 1)
        twice = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
        other(torch.ones(1, 2)).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1"):
            other(torch.ones(1, 2)).sum().backward()
        twice.load_state_dict(twice.state_dict())
        twice.zero_grad()
        return True

    assert launcher.run(train)


def test_options_of_the_reduction(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()

        def gradient(make: Any, x: Any, passes: int = 1, **options: Any) -> Any:
            model = make()
            hvd.broadcast_parameters(model.state_dict())
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
            if passes > 1:
                optimizer.set_backward_passes_per_step(passes)
            for _ in range(passes):
                model(x).sum().backward()
            optimizer.synchronize()
            return model.weight.grad

        def linear() -> Any:
            return torch.nn.Linear(2, 1, bias=False)

        def embedding() -> Any:
            return torch.nn.Embedding(4, 2, sparse=True)

        x, row = torch.full((1, 2), rank + 1.0), torch.tensor([rank])
        dense = gradient(embedding, row, sparse_as_dense=True)
        sparse = gradient(embedding, row)
        assert (dense.is_sparse, sparse.is_sparse) == (True, True), "the step gets what the backward pass gave"
        assert torch.equal(dense.to_dense(), sparse.to_dense())
        return {
            "average": gradient(linear, x).tolist(),
            "predivided": gradient(linear, x, gradient_predivide_factor=4.0).tolist(),
            "sum": gradient(linear, x, op=hvd.Sum).tolist(),
            "passes": gradient(linear, x, passes=3).tolist(),
            "rows": dense.to_dense().tolist(),
        }

    assert launcher.run(train) == {
        "average": [[1.5, 1.5]],
        "predivided": [[1.5, 1.5]],
        "sum": [[3.0, 3.0]],
        "passes": [[4.5, 4.5]],
        "rows": [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]],
    }


def test_batch_norm_over_all_ranks(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        # Far from zero, where squares have no digits left.
        whole = 1000 + torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
        mine = whole[:3] if hvd.rank() == 0 else whole[3:]
        ours, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
        whole, mine = whole.requires_grad_(), mine.detach().clone().requires_grad_()
        normal, expected = ours(mine), plain(whole)
        found = torch.cat(hvd.allgather_object(normal.detach()))
        torch.testing.assert_close(found, expected.detach(), atol=1e-3, rtol=1e-3)
        # Of what all ranks make of it, not of this one's part alone.
        normal.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        found = torch.cat(hvd.allgather_object(mine.grad))
        torch.testing.assert_close(found, whole.grad, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(ours.running_var, plain.running_var)
        torch.testing.assert_close(ours.running_mean, plain.running_mean)
        return True

    assert launcher.run(train)


def test_batch_norm_of_every_kind(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        generator = torch.Generator().manual_seed(1)

        def compared(shape: Any, needs_input: bool = True, **options: Any) -> None:
            """Two steps of training and one of evaluation, against torch's own layer on the batch of all ranks."""
            ours, plain = hvd.SyncBatchNorm(3, **options).double(), torch.nn.BatchNorm1d(3, **options).double()
            if ours.affine:
                for layer in (ours, plain):
                    torch.nn.init.constant_(layer.weight, 1.5)
                    torch.nn.init.constant_(layer.bias, 0.5)
            plain._check_input_dim = lambda _: None
            for is_training in (True, True, False):
                ours.train(is_training)
                plain.train(is_training)
                whole = torch.randn(shape, generator=generator, dtype=torch.float64)
                mine = (whole[:1] if rank == 0 else whole[1:]).clone().requires_grad_(needs_input)
                whole.requires_grad_(needs_input)
                normal, expected = ours(mine), plain(whole)
                torch.testing.assert_close(torch.cat(hvd.allgather_object(normal.detach())), expected.detach())
                if not (needs_input or ours.affine):
                    continue
                normal.pow(3).sum().backward()
                expected.pow(3).sum().backward()
                if needs_input:
                    torch.testing.assert_close(torch.cat(hvd.allgather_object(mine.grad)), whole.grad)
                for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
                    # Of this rank's part; DistributedOptimizer adds them up.
                    torch.testing.assert_close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad)
                    one.grad = other.grad = None
            torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))

        compared((5, 3))
        compared((5, 3, 4, 2))
        compared((5, 3, 4), needs_input=False)
        compared((5, 3, 4), momentum=None)
        compared((5, 3, 4), momentum=0.0, eps=0.1)
        compared((5, 3, 4), affine=False)
        compared((5, 3, 4), affine=False, needs_input=False)
        compared((5, 3, 4), track_running_stats=False)
        return True

    assert launcher.run(train)


def test_batch_norm_in_half_a_precision(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        # More rows than the largest number of a float16.
        whole = 3 + torch.randn(2, 3, 40_000, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.bfloat16, torch.float16):
            for has_statistics in (True, False):
                for of_model in (torch.float32, dtype):
                    ours = hvd.SyncBatchNorm(3, track_running_stats=has_statistics).to(of_model)
                    plain = torch.nn.BatchNorm1d(3, track_running_stats=has_statistics).to(of_model)
                    mine = whole[hvd.rank() :][:1].to(dtype).requires_grad_()
                    normal, expected = ours(mine), plain(whole.to(dtype))
                    assert normal.dtype == expected.dtype == dtype
                    torch.testing.assert_close(normal, expected[hvd.rank() :][:1], atol=2e-2, rtol=2e-2)
                    normal.float().pow(3).sum().backward()
                    assert mine.grad.dtype == dtype
                    assert mine.grad.isfinite().all()
                    if has_statistics:
                        torch.testing.assert_close(ours.running_mean, plain.running_mean, atol=1e-2, rtol=1e-2)
                        torch.testing.assert_close(ours.running_var, plain.running_var, atol=1e-2, rtol=1e-2)
        return True

    assert launcher.run(train)


def test_batch_norm_of_one_row_in_all_leaves_statistics_finite(launcher: Launcher) -> None:
    def train() -> Any:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        ours = hvd.SyncBatchNorm(3)
        ours(torch.ones(1 - hvd.rank(), 3))
        return torch.cat([ours.running_mean, ours.running_var]).isfinite().all().item()

    assert launcher.run(train)
