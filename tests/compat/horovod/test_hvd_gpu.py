"""`hvd` with tensors on GPUs, a rank for each."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero import Launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_values_and_gradients_stay_on_the_gpu(tmp_path: Path) -> None:
    def train() -> None:
        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        rank, size = hvd.rank(), hvd.size()
        for dtype in (torch.float16, torch.float32, torch.int64):
            mine = torch.full((1_000_000,), rank + 1, dtype=dtype, device=device)
            assert (hvd.allreduce(mine, op=hvd.Sum) == sum(range(size + 1))).all()
            assert (hvd.broadcast(mine, size - 1) == size).all()
        rows = hvd.allgather(torch.full((rank + 1, 2), rank, device=device))
        assert rows[:, 0].tolist() == [other for other in range(size) for _ in range(other + 1)]
        # Beside them, on the CPU.
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
        weights = [torch.nn.Parameter(torch.zeros(1_000_000, device=device)) for _ in range(4)]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        for step in range(1, 51):
            optimizer.zero_grad()
            sum((weight * (rank + 1) * step).sum() for weight in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            assert all((weight.grad == step * (size + 1) / 2).all() for weight in weights)

    Launcher(torch.cuda.device_count(), store=tmp_path).run(train)
