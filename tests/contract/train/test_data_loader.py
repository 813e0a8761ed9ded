"""Each rank its share: every row once for each epoch, another order in each, arguments kept, resumable."""

import itertools
import json
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import rankzero.train as rt
from rankzero import Launcher
from rankzero.train import batches, context

ROWS = 23


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Range(IterableDataset[int]):
    """The data set of torch's documentation, whose bounds a worker_init_fn sets."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


class Stateful(DataLoader[int]):
    """A loader with a state as torchdata's has it: how many batches it gave itself."""

    begin = given = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __iter__(self) -> Any:
        begin, self.begin = self.begin, 0
        self.given = begin
        for batch in itertools.islice(super().__iter__(), begin, None):
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["given"]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a rank, for what needs no other."""

    def become(rank: int, world_size: int) -> None:
        here = context.TrainContext(rank=rank, world_size=world_size, backend="gloo")
        monkeypatch.setattr(context, "_session", context._Session(here))

    return become


def rows_of(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch]


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_row_once_for_each_epoch_evenly(as_rank: Any, world_size: int, shuffle: bool, drop_last: bool) -> None:
    epochs = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        loader = rt.prepare_data_loader(DataLoader(Numbers(), 4, shuffle=shuffle, drop_last=drop_last))
        epochs.append([rows_of(loader) for _ in range(2)])
        assert len(list(loader)) == len(loader)
    for epoch in range(2):
        shares = [mine[epoch] for mine in epochs]
        assert len({len(share) for share in shares}) == 1, "no rank waits for another"
        seen = Counter(row for share in shares for row in share)
        assert sum(count - 1 for count in seen.values()) < world_size
        assert drop_last or set(seen) == set(range(ROWS))
    if shuffle:
        assert epochs[0][0] != epochs[0][1], "another order in each epoch"


def test_every_argument_is_kept(as_rank: Any) -> None:
    as_rank(0, 2)
    generator = torch.Generator()
    given: dict[str, Any] = {
        "num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "multiprocessing_context": "fork",
        "timeout": 7, "worker_init_fn": print, "collate_fn": list, "generator": generator, "in_order": False,
        "pin_memory": True, "pin_memory_device": "cuda:1",
    }  # fmt: skip
    loader = rt.prepare_data_loader(DataLoader(Numbers(), 3, shuffle=True, **given), seed=0)
    assert loader.batch_size == 3
    assert loader.multiprocessing_context.get_start_method() == "fork"
    for name in given.keys() - {"multiprocessing_context"}:
        assert getattr(loader, name) is given[name] or getattr(loader, name) == given[name], name


@pytest.mark.parametrize("pad", [False, True])
def test_an_iterable_data_set_is_shared_out_in_each_process(as_rank: Any, pad: bool) -> None:
    shares = []
    for rank in range(3):
        as_rank(rank, 3)
        shares.append(rows_of(rt.prepare_data_loader(DataLoader(Range(0, ROWS), 4), pad=pad)))
    seen = Counter(row for share in shares for row in share)
    assert set(seen) == set(range(ROWS))
    assert [len(share) for share in shares] == ([8, 8, 8] if pad else [8, 8, 7])


def test_loader_processes_share_a_stream_by_its_attributes_and_go_on_in_an_epoch(tmp_path: Path) -> None:
    def take_part(worker: int) -> None:
        data: Any = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
        middle = (data.start + data.end) // 2
        data.start, data.end = ((data.start, middle), (middle, data.end))[worker]

    def train() -> Any:
        import rankzero.train as rt

        loader = DataLoader(Range(0, 16), 4, num_workers=2, worker_init_fn=take_part)
        streamed = rows_of(rt.prepare_data_loader(loader))
        numbers: Any = range(16)
        first, again = (rt.prepare_data_loader(DataLoader(numbers, 2, shuffle=True, num_workers=1)) for _ in range(2))
        batches = iter(first)
        seen = next(batches).tolist()
        again.load_state_dict(first.state_dict())
        return rt.all_gather_object((streamed, seen + rows_of(again)))

    for shares in zip(*Launcher(2, store=str(tmp_path)).run(train), strict=True):
        assert Counter(row for share in shares for row in share) == Counter(range(16))


class EverySecond(SequentialSampler):
    """Yields a rank's share as torch's DistributedSampler does, of which it is no subclass."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, ROWS, 2))

    def __len__(self) -> int:
        return ROWS // 2


def test_what_is_a_share_already_stays(as_rank: Any) -> None:
    as_rank(1, 2)
    own = DistributedSampler(Numbers(), 2, 1, shuffle=True, seed=9)
    loader = rt.prepare_data_loader(DataLoader(Numbers(), 4, sampler=own))
    assert loader.sampler is own
    own.set_epoch(5)
    fifth = rows_of(loader)
    assert loader.epoch == 6, "the training function's own epoch counts"
    assert rows_of(loader) != fifth
    assert rows_of(rt.prepare_data_loader(DataLoader(Numbers(), 4), shard=False)) == list(range(ROWS))
    loaders: list[Any] = [
        DataLoader(Numbers(), 4, sampler=EverySecond(Numbers())),
        DataLoader(Numbers(), batch_sampler=BatchSampler(EverySecond(Numbers()), 4, drop_last=False)),
    ]
    assert [rows_of(rt.prepare_data_loader(loader)) for loader in loaders] == [list(range(1, ROWS, 2))] * 2


@pytest.mark.parametrize("worlds", [(2, 2, 1), (2, 1, 1), (1, 2, 2), (2, 4, 2)])
def test_a_stateful_loader_goes_on_in_other_world_sizes(as_rank: Any, worlds: tuple[int, ...]) -> None:
    """Each world gives four batches, and the next one goes on."""

    def loader() -> Any:
        return rt.prepare_data_loader(Stateful(range(32), 2, shuffle=True))  # type: ignore[arg-type]

    seen, state = Counter[int](), None
    for world_size in worlds:
        states = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            mine = loader()
            if state:
                mine.load_state_dict(state)
            batches = iter(mine)
            seen.update(int(row) for batch in itertools.islice(batches, 4 // world_size) for row in batch)
            states.append(mine.state_dict())
        state = states[0]
    for rank in range(worlds[-1]):
        as_rank(rank, worlds[-1])
        mine = loader()
        mine.load_state_dict(state)
        seen.update(rows_of(mine))
    assert seen == Counter(range(32))


@pytest.mark.parametrize(("world_before", "world_after"), [(1, 1), (2, 2), (2, 3)])
def test_it_goes_on_in_the_middle_of_an_epoch(as_rank: Any, world_before: int, world_after: int) -> None:
    states, seen = [], Counter[int]()
    for rank in range(world_before):
        as_rank(rank, world_before)
        loader = rt.prepare_data_loader(DataLoader(Numbers(), 3, shuffle=True))
        rows_of(loader)
        batches = iter(loader)
        seen.update(int(row) for _ in range(2) for row in next(batches))
        states.append(loader.state_dict())
    assert states[0] == states[-1]
    for rank in range(world_after):
        as_rank(rank, world_after)
        data = Numbers()
        loader = rt.prepare_data_loader(DataLoader(data, 3, shuffle=True))
        loader.load_state_dict(states[0])
        rest = rows_of(loader)
        assert data.loaded == rest, "rows that were seen are not loaded again"
        seen.update(rest)
        assert loader.epoch == 2
        assert len(rows_of(loader)) == -(-ROWS // world_after), "the next epoch is whole"
    assert set(seen) == set(range(ROWS))


class Sized(Range):
    def __len__(self) -> int:
        return self.end - self.start


@pytest.mark.parametrize("shard", [False, True])
def test_a_position_is_that_of_ranks_with_other_numbers_of_rows(as_rank: Any, shard: bool) -> None:
    def loader(rank: int, world_size: int) -> Any:
        as_rank(rank, world_size)
        data = Sized(0, ROWS if shard else 10 + rank)
        return rt.prepare_data_loader(DataLoader(data, 2), shard=shard, pad=False)

    first = loader(0, 2)
    list(itertools.islice(first, 2))
    state = first.state_dict()
    for rank, world_size in ((1, 2), (0, 1)):
        whole, again = loader(rank, world_size), loader(rank, world_size)
        again.load_state_dict(state)
        assert rows_of(again) == rows_of(whole)[8 // world_size :]


@pytest.mark.parametrize("kind", [DataLoader, Stateful])
@pytest.mark.parametrize(("size", "begin"), [(4, 12), (2, 12), (5, 10)])
def test_a_position_is_converted_to_another_batch_size(as_rank: Any, kind: Any, size: int, begin: int) -> None:
    as_rank(0, 1)

    def loader(size: int) -> Any:
        return rt.prepare_data_loader(kind(range(40), size, shuffle=True))

    first = loader(4)
    list(itertools.islice(first, 3))
    state = json.loads(json.dumps(first.state_dict())) if kind is DataLoader else first.state_dict()
    again = loader(size)
    again.load_state_dict(state)
    assert rows_of(again) == rows_of(loader(size))[begin:]


def test_an_order_follows_the_seed_of_the_loaders_generator(as_rank: Any) -> None:
    as_rank(0, 1)
    used = torch.Generator().manual_seed(1)
    torch.rand(3, generator=used)
    for sampler in (None, WeightedRandomSampler([1.0] * ROWS, ROWS, generator=used)):

        def order(generator: torch.Generator, sampler: Any = sampler, **seed: int) -> list[int]:
            if sampler:
                sampler.generator = generator
            loader = DataLoader(Numbers(), 4, shuffle=None if sampler else True, sampler=sampler, generator=generator)
            return rows_of(rt.prepare_data_loader(loader, **seed))

        first, second = order(torch.Generator().manual_seed(1)), order(torch.Generator().manual_seed(2))
        assert first != second
        assert order(used) == order(used) == first, "after a restart, too"
        assert order(used, seed=2) == second
        assert used.initial_seed() == 1
    batches = BatchSampler(RandomSampler(range(ROWS), generator=used), 4, drop_last=False)
    orders = [rows_of(rt.prepare_data_loader(DataLoader(Numbers(), batch_sampler=batches))) for _ in range(2)]
    assert orders[0] == orders[1]


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self)))


class Even(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index % 2 == 0)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SequentialSampler(range(4)), [0, 1, 2, 3]),
        (RandomSampler(range(4)), {0, 1, 2, 3}),
        (Even(range(10)), {0, 2, 4, 6, 8}),
        (Backwards(range(5)), [4, 3, 2, 1, 0]),
    ],
)
def test_a_sampler_of_a_part_or_with_an_order_of_its_own_is_kept(as_rank: Any, sampler: Any, expected: Any) -> None:
    as_rank(0, 1)
    found = rows_of(rt.prepare_data_loader(DataLoader(range(10), 2, sampler=sampler)))  # type: ignore[arg-type]
    assert type(expected)(found) == expected


def test_other_samplers_give_every_rank_its_part_of_rank_zeros_order(tmp_path: Path) -> None:
    class Shuffled:
        """A batch sampler of somebody else's, with an order that no seed gives."""

        def __iter__(self) -> Iterator[list[int]]:
            import random

            return iter([[row] * 2 for row in random.SystemRandom().sample(range(7), 7)])

        def __len__(self) -> int:
            return 7

    def train() -> Any:
        import torch

        import rankzero.train as rt

        rank = rt.get_context().rank
        torch.manual_seed(rank)
        rare = WeightedRandomSampler([1.0] * ROWS, 8, replacement=False)
        plain = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
        loaders = [
            DataLoader(Numbers(), 2, sampler=rare),
            DataLoader(Numbers(), batch_sampler=Shuffled(), num_workers=1),
            DataLoader(Numbers(), batch_sampler=plain),
            DataLoader(Numbers(), batch_size=None, sampler=[5, 6, 7, 8]),
            DataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(rank)),
        ]
        shares = []
        for loader in loaders:
            prepared = rt.prepare_data_loader(loader)
            share = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in prepared]
            assert len(share) == len(prepared)
            shares.append(share)
        return list(zip(*rt.all_gather_object(shares), strict=True))

    rare, batches, plain, single, seeded = Launcher(2, store=str(tmp_path)).run(train)
    drawn = [row for share in rare for batch in share for row in batch]
    assert len(set(drawn)) == len(drawn) == 8, "drawn once, not once for each rank"
    assert {batch[0] for share in batches for batch in share} == set(range(7))
    assert [len(share) for share in batches] == [4, 4]
    assert sorted(row for share in plain for batch in share for row in batch) == list(range(8))
    assert [list(share) for share in single] == [[5, 7], [6, 8]]
    assert {row for share in seeded for batch in share for row in batch} == set(range(ROWS)), "by rank 0's seed"


def test_nested_batches_keep_their_types_and_packed_sequences_their_sizes() -> None:
    pair = namedtuple("pair", "x y")
    packed = pack_sequence([torch.zeros(1), torch.zeros(3)], enforce_sorted=False)
    batch = pair({"a": torch.zeros(1)}, [(torch.zeros(1), "text"), None, packed])
    [moved] = batches.on_device(iter([batch]), torch.device("meta"))
    assert type(moved) is pair
    assert moved.x["a"].is_meta
    assert (moved.y[0][0].is_meta, moved.y[0][1], moved.y[1]) == (True, "text", None)
    assert type(moved.y[2]) is PackedSequence
    assert moved.y[2].data.is_meta
    assert moved.y[2].batch_sizes.equal(packed.batch_sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu() -> None:
    loader = rt.prepare_data_loader(DataLoader(TensorDataset(torch.arange(10.0)), 3, pin_memory=True))
    assert all(values.is_pinned() for [values] in loader.loader), "before they are copied"
    batches = [values for [values] in loader]
    assert all(values.is_cuda for values in batches)
    assert torch.cat(batches).cpu().equal(torch.arange(10.0))


class RandomPart(torch.utils.data.Sampler[int]):
    """Draws by torch."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(9)[:5].tolist())


def test_a_drawn_order_leaves_the_random_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    for device in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(device, "_is_in_bad_fork", lambda: False, raising=False)
        for name in ("manual_seed", "manual_seed_all"):
            monkeypatch.setattr(device, name, seeded.append, raising=False)
    torch.manual_seed(1)
    assert seeded, "the devices that torch knows"
    seeded.clear()
    orders = [rows_of(rt.prepare_data_loader(DataLoader(range(9), sampler=RandomPart()))) for _ in range(2)]  # type: ignore[arg-type]
    assert orders[0] == orders[1]
    assert seeded == []


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a torch.utils.data.DataLoader, not a list"):
        rt.prepare_data_loader([1, 2])
