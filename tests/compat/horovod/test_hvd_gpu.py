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


def test_values_stay_on_the_gpu_and_an_optimizer_trains_as_ddp_does(tmp_path: Path) -> None:
    def train() -> Any:
        from torch.nn.parallel import DistributedDataParallel

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
        generator = torch.Generator().manual_seed(hvd.rank())
        batches = [torch.randn(8, 16, generator=generator).to(device) for _ in range(50)]
        found = []
        for is_ours in (True, False):
            torch.manual_seed(0)
            model: Any = torch.nn.Linear(16, 1, device=device)
            model = model if is_ours else DistributedDataParallel(model, device_ids=[device])
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
            if is_ours:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                loss.backward()
                optimizer.step()
            found.append(loss.item())
        return found

    ours, plain = Launcher(torch.cuda.device_count(), store=tmp_path).run(train)
    assert ours == pytest.approx(plain, abs=1e-5)
