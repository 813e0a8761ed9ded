"""An elastic state in worlds of several sizes: each attempt goes on from the last commit of another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.kit import SlotsEngine

import rankzero.compat.horovod.torch as hvd
import rankzero.train as rt
from rankzero import Launcher, RetryableError
from rankzero.train.context import await_checkpoint


def train(slots: str, sizes: list[int]) -> Any:
    """Two batches an attempt, then a commit, then another world; the last one goes to the end of the epoch."""
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
        state.history = [*state.history, [hvd.size(), optimizer.param_groups[0]["lr"], hvd.allgather_object(seen)]]
        if is_last:
            return state.history, state.batch, hvd.allgather_object(model.weight.item())
        state.commit()
        if hvd.rank() == 0:
            # Never seen half written.
            Path(f"{slots}-new").write_text(str(sizes[attempt + 1]))
            Path(f"{slots}-new").replace(slots)
        hvd.barrier()
        raise RetryableError("the world changes")

    return loop(state)


def test_a_commit_is_gone_on_from_by_fewer_ranks_and_by_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    slots, sizes = tmp_path / "slots", [2, 1, 2]
    slots.write_text("2")
    launcher = Launcher((1, 2), engine=SlotsEngine(str(slots)), store=tmp_path / "runs", max_restarts=2)
    history, batches, weights = launcher.run(train, str(slots), sizes)
    assert [each[:2] for each in history] == [[2, 0.1], [1, 0.1], [2, 0.2]], "a reset before each later attempt"
    assert [[len(of) for of in seen] for _, _, seen in history] == [[2, 2], [2], [3, 3]]
    assert sorted(index for _, _, seen in history for of in seen for index in of) == list(range(12)), "each index once"
    assert batches == 7
    # The same steps by hand: the gradient is 1, and the momentum lives on.
    weight, speed = 1.0, 0.0
    for lr in [0.1] * 4 + [0.2] * 3:
        speed = 0.5 * speed + 1.0
        weight -= lr * speed
    assert weights == [pytest.approx(weight)] * 2, "no step is lost, none counts twice, and all ranks agree"


def test_a_sampler_shares_out_what_is_left() -> None:
    sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
    sampler.record_batch(0, 2)
    assert list(sampler) == [0, 1, 2, 3, 4], "until the next reset"
    sampler.reset()
    assert (sampler.remaining_indices, sampler.indices, len(sampler)) == ([2, 3, 4], [2, 3, 4], 3)
    sampler.set_epoch(1)
    assert list(sampler) == list(range(5))
    # Loaders that count epochs refuse one.
    data = torch.utils.data.TensorDataset(torch.arange(5.0))
    loader = torch.utils.data.DataLoader(data, sampler=hvd.elastic.ElasticSampler(data))
    with pytest.raises(TypeError, match="ElasticSampler shares out the indices and keeps the position itself"):
        rt.prepare_data_loader(loader)


def test_a_state_is_restored_from_its_last_save() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = hvd.elastic.TorchState(None, optimizer, scheduler=scheduler, best=[])
    for best in ("saved", "lost"):
        optimizer.step()
        scheduler.step()
        state.best.append(best)
        if best == "saved":
            state.save()
    state.restore()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], state.best) == (1, 0.5, ["saved"])


class Counted(hvd.elastic.ObjectState):
    """A state that saves more than its attributes, which are there only after the constructor."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.saves = 0

    def save(self) -> None:
        self.saves += 1
        super().save()


def test_a_subclass_may_save_more_but_not_instead_of_its_attributes() -> None:
    state: Any = Counted(step=1, mean=torch.ones(2))
    state.save()
    assert (state.saves, state.step) == (1, 1)
    state.mean = state.mean.to("meta")
    state.restore()
    assert state.mean.device.type == "meta", "the device of the attribute that it replaces"
    with pytest.raises(TypeError, match="Counted has no attributes to commit"):
        Counted().commit()


def loops_of_two_states() -> Any:
    """The first state is never committed; the second one, of the same names, is."""
    hvd.init()
    loop = hvd.elastic.run(lambda state, step: (state.step, setattr(state, "step", step))[0])
    first, second = (hvd.elastic.ObjectState(step=0) for _ in range(2))
    seen = [loop(first, 1), loop(first, 2), first.step, loop(second, 7), loop(second, 8)]
    if rt.get_context().attempt == 1:
        return hvd.allgather_object(seen)
    second.commit()
    raise RetryableError("again")


def a_report_of_its_own() -> Any:
    hvd.init()
    state = hvd.elastic.ObjectState(epoch=0)
    if rt.get_context().attempt:
        return hvd.elastic.run(lambda state: [state.epoch, hvd.rank()])(state)
    rt.report({}, checkpoint={"weights": 1})
    await_checkpoint()
    raise RetryableError("again")


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        # No loop loses what this attempt has done, and no state takes the other's commit.
        (loops_of_two_states, [[0, 1, 2, 8, 7]] * 2),
        (a_report_of_its_own, [0, 0]),
    ],
)
def test_the_next_attempt_has_the_last_commit_of_each_state(tmp_path: Path, train: Any, expected: Any) -> None:
    assert Launcher(2, store=tmp_path, max_restarts=1).run(train) == expected
