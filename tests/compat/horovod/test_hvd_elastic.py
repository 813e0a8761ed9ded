"""An elastic state in worlds of several sizes: each attempt goes on from the last commit of another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
from tests.faults.kit import SlotsEngine

from rankzero import Launcher, RetryableError
from rankzero.driver import policy


def train(slots: str, sizes: list[int]) -> Any:
    """Two batches an attempt, then a commit, then another world; the last one goes to the end of the epoch."""
    import time

    import torch

    import rankzero.compat.horovod.torch as hvd
    import rankzero.train as rt

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, history=[])

    def reset() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * hvd.size()

    state.register_reset_callbacks([reset])

    def is_kept(batch: int) -> bool:
        last = rt.get_checkpoint()
        return last is not None and last.load()["elastic"]["values"]["batch"] == batch

    @hvd.elastic.run
    def loop(state: Any) -> Any:
        attempt = rt.get_context().attempt
        is_last = attempt == len(sizes) - 1
        seen = []
        for batch, index in enumerate(list(state.sampler)):
            if batch == 2 and not is_last:
                break
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.sampler.record_batch(batch, 1)
            state.batch += 1
            seen.append(index)
        lr = optimizer.param_groups[0]["lr"]
        state.history = [*state.history, [hvd.size(), lr, sorted(i for of in hvd.allgather_object(seen) for i in of)]]
        if is_last:
            weights = hvd.allgather_object(model.weight.item())
            return state.history, state.batch, weights
        state.commit()
        # Rank 0 alone has a checkpoint to wait for.
        while hvd.rank() == 0 and not is_kept(state.batch):
            time.sleep(0.01)
        if hvd.rank() == 0:
            # Never seen half written.
            Path(f"{slots}-new").write_text(str(sizes[attempt + 1]))
            Path(f"{slots}-new").replace(slots)
        hvd.barrier()
        raise RetryableError("the world changes")

    return loop(state)


def test_a_commit_is_gone_on_from_by_fewer_ranks_and_by_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "WAITING_INTERVAL", 0.05)
    monkeypatch.setattr(policy, "GROWTH_PATIENCE", 0.2)
    slots, sizes = tmp_path / "slots", [2, 1, 2]
    slots.write_text("2")
    launcher = Launcher((1, 2), engine=SlotsEngine(str(slots)), store=tmp_path / "runs", max_restarts=2)
    history, batches, weights = launcher.run(train, str(slots), sizes)
    assert [(size, lr) for size, lr, _ in history] == [(2, 0.1), (1, 0.1), (2, 0.2)], (
        "a reset before each later attempt"
    )
    assert [len(seen) for _, _, seen in history] == [4, 2, 6]
    assert sorted(index for _, _, seen in history for index in seen) == list(range(12)), "each index once"
    assert batches == 7
    # The same steps by hand: the gradient is 1, and the momentum lives on.
    weight, speed = 1.0, 0.0
    for lr in [0.1] * 4 + [0.2] * 3:
        speed = 0.5 * speed + 1.0
        weight -= lr * speed
    assert weights == [pytest.approx(weight)] * 2, "no step is lost, none counts twice, and all ranks agree"
