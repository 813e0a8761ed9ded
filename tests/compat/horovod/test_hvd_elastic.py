"""An elastic state in worlds of several sizes: each attempt goes on from the last commit of another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.kit import SlotsEngine

import rankzero.compat.horovod.torch as hvd
import rankzero.train as rt
from rankzero import Launcher, RetryableError, WorkerFailedError
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
        lr = optimizer.param_groups[0]["lr"]
        state.history = [*state.history, [hvd.size(), lr, sorted(i for of in hvd.allgather_object(seen) for i in of)]]
        if is_last:
            weights = hvd.allgather_object(model.weight.item())
            return state.history, state.batch, weights
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


def weight(model: torch.nn.Linear) -> float:
    return model.weight.item()


def linear(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def test_what_is_assigned_later_is_saved_and_restored() -> None:
    state = hvd.elastic.TorchState(linear(1.0), None, epoch=0)
    assert state.optimizer is None, "a name that is there, as the caller gave it"
    state.restore()
    assert (state.optimizer, state.epoch) == (None, 0)
    state.model = other = linear(2.0)
    torch.nn.init.constant_(other.weight, 3.0)
    state.restore()
    assert state.model is other
    assert weight(other) == 2.0, "as it was when it was assigned"
    torch.nn.init.constant_(other.weight, 4.0)
    state.optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    state.epoch = 1
    state.save()
    torch.nn.init.constant_(other.weight, 5.0)
    state.optimizer.param_groups[0]["lr"] = 0.1
    state.epoch = 2
    state.restore()
    assert (weight(other), state.optimizer.param_groups[0]["lr"], state.epoch) == (4.0, 0.5, 1)


def test_a_sampler_has_what_scripts_read() -> None:
    sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    sampler.record_batch(0, 2)
    sampler.reset()
    assert (sampler.remaining_indices, sampler.indices) == ([2, 3, 4], [2, 3, 4])
    assert (sampler.num_samples, sampler.total_size, len(sampler)) == (3, 3, 3)
    other = hvd.elastic.ElasticSampler(range(5), shuffle=False)
    other.load_state_dict({"epoch": 0, "processed_indices": [0]})
    assert list(other) == [1, 2, 3, 4], "of a list or a set, as users keep it"
    other.load_state_dict(sampler.state_dict())
    assert list(other) == [2, 3, 4]


def test_a_sampler_takes_the_state_of_horovod_s_own() -> None:
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=True, seed=3)
    whole = list(sampler)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 3)
    assert sampler.processed_num == 3
    again = hvd.elastic.ElasticSampler(range(8), shuffle=True, seed=3)
    again.load_state_dict({"epoch": 0, "processed_num": 3})
    assert again.processed_indices == set(whole[:3])
    assert again.processed_num == 3
    again.num_replicas = 2
    again.record_indices([whole[3]])
    assert again.processed_num == 5, "the other rank is at the same place"


def test_a_sampler_with_a_position_is_refused_by_loaders_that_count_epochs() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(5.0))
    loader = torch.utils.data.DataLoader(data, sampler=hvd.elastic.ElasticSampler(data))
    with pytest.raises(TypeError, match="ElasticSampler shares out the indices and keeps the position itself"):
        rt.prepare_data_loader(loader)


class Counter(hvd.elastic.State):
    """As it would be written for Horovod: it remembers in attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self.model, self.count = model, 0
        self._saved_count, self._saved_model = 0, model.state_dict()

    def save(self) -> None:
        self._saved_count = self.count
        self._saved_model = {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> None:
        self.count = self._saved_count
        self.model.load_state_dict(self._saved_model)

    def sync(self) -> None:
        self.count = self._bcast_object(self.count)


def test_a_state_that_was_written_for_horovod_remembers_in_its_attributes() -> None:
    state = Counter(linear(1.0))
    torch.nn.init.constant_(state.model.weight, 2.0)  # type: ignore[arg-type]
    state.count = 3
    state.save()
    model = linear(1.0)
    later = Counter(model)
    later.load(state.saved())
    assert (later.count, weight(model)) == (3, 2.0)
    assert later.model is model, "the one that the training has"


class Best(hvd.elastic.TorchState):
    def save(self) -> None:
        self._saved_best = getattr(self, "best", None)
        super().save()

    def restore(self) -> None:
        super().restore()
        self.best = self._saved_best


def several_parts() -> Any:
    hvd.init()
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    samplers = {name: hvd.elastic.ElasticSampler(range(4), shuffle=False) for name in ("first", "second")}
    state = Best(model, optimizer, scheduler=scheduler, **samplers)
    if hvd.rank() == 1:
        # It has gone further than rank 0.
        optimizer.step()
        scheduler.step()

    @hvd.elastic.run
    def loop(state: Any) -> Any:
        steps = scheduler.last_epoch
        if rt.get_context().attempt == 1:
            lefts = [list(sampler.remaining_indices) for sampler in samplers.values()]
            return hvd.allgather_object((steps, optimizer.param_groups[0]["lr"], state.best, lefts))
        assert steps == 0, "rank 0's"
        optimizer.step()
        scheduler.step()
        state.best = "so far"
        samplers["first"].record_batch(0, 1)
        if hvd.rank() == 1:
            samplers["second"].record_batch(0, 2)
        state.commit()
        raise RetryableError("again")

    return loop(state)


def test_every_part_of_a_state_comes_back(tmp_path: Path) -> None:
    found = Launcher(2, store=tmp_path, max_restarts=1).run(several_parts)
    assert found == [(1, 0.5, "so far", [[2, 3], [0, 2]])] * 2


def two_loops() -> Any:
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> Any:
        return hvd.allgather_object(state.step)

    first = hvd.elastic.ObjectState(step=0)
    loop(first)
    first.step = 1
    first.commit()
    first.step = 2
    assert loop(first) == [2, 2], "nothing of this attempt is lost"
    assert loop(hvd.elastic.ObjectState(step=7)) == [7, 7]
    hvd.elastic.ObjectState(size=1).commit()
    raise RetryableError("again")


def two_states_of_the_same_names() -> Any:
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        """Only restores and synchronizes."""

    first, second = (hvd.elastic.ObjectState(epoch=0) for _ in range(2))
    loop(first)
    loop(second)
    second.epoch = 7
    second.commit()
    raise RetryableError("again")


def a_report_of_ones_own() -> Any:
    hvd.init()
    if rt.get_context().attempt:
        hvd.elastic.run(print)(hvd.elastic.ObjectState(epoch=0))
    rt.report({}, checkpoint={"weights": 1})
    await_checkpoint()
    raise RetryableError("again")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (two_loops, "the last commit is of a state with size, not step"),
        (two_states_of_the_same_names, "the last commit is of state 2 of the training, not of state 1"),
        (a_report_of_ones_own, "the last checkpoint is of rt.report, not of state.commit"),
    ],
)
def test_a_checkpoint_of_something_else_is_never_taken_for_the_state(tmp_path: Path, train: Any, message: str) -> None:
    with pytest.raises(WorkerFailedError, match=message):
        Launcher(2, store=tmp_path, max_restarts=1).run(train)
