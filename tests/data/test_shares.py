"""Every row of an epoch once, and the same number of batches on every rank, whatever the world does meanwhile."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rankzero.data.shares import Batches, Stretch, cut, length, remaining, share, split, united

rows = st.integers(0, 300)
worlds = st.integers(1, 9)
sizes = st.integers(1, 40)


def positions(spans: list[tuple[int, int]]) -> list[int]:
    return [position for low, high in spans for position in range(low, high)]


@given(rows, worlds)
def test_shares_differ_by_one_row_at_most_and_are_all_rows(total: int, world: int) -> None:
    parts = [split(total, world, rank) for rank in range(world)]
    counts = [high - low for low, high in parts]
    assert max(counts) - min(counts) <= 1
    assert positions(parts) == list(range(total))


@given(rows, worlds, sizes, st.booleans())
def test_every_rank_has_the_same_number_of_batches(total: int, world: int, size: int, drop_last: bool) -> None:
    plans = [Batches.of(total, world, rank, size, drop_last=drop_last) for rank in range(world)]
    assert len({plan.count for plan in plans}) == 1
    for plan in plans:
        counts = [plan.done(number + 1) - plan.done(number) for number in range(plan.count)]
        assert all(0 <= count <= size for count in counts)
        if drop_last:
            assert counts == [size] * plan.count
        else:
            assert sum(counts) == plan.own
            # None is empty, unless there are fewer rows than batches.
            assert plan.own < plan.count or 0 not in counts
            # Whole ones, but for the last two.
            assert counts[:-2] == [size] * (plan.count - 2 if plan.count > 2 else 0)


@given(rows, st.lists(st.tuples(worlds, sizes, st.integers(0, 12)), max_size=4), worlds, sizes)
def test_every_row_comes_once_in_an_epoch_of_changing_worlds(
    total: int, stretches: list[tuple[int, int, int]], last_world: int, last_size: int
) -> None:
    seen: list[int] = []
    consumed: list[Stretch] = []

    def consume(world: int, size: int, batches: int | None) -> None:
        left = remaining(total, consumed)
        done = 0
        for rank in range(world):
            plan = Batches.of(length(left), world, rank, size, drop_last=False)
            done = plan.count if batches is None else min(batches, plan.count)
            seen.extend(positions(cut(share(left, world, rank), 0, plan.done(done))))
        consumed.append(Stretch(world, size, False, done))

    for world, size, batches in stretches:
        consume(world, size, batches)
    consume(last_world, last_size, None)
    assert sorted(seen) == list(range(total))
    assert remaining(total, consumed) == []
    assert [Stretch.from_json(stretch.to_json()) for stretch in consumed] == consumed


@given(rows, st.lists(st.tuples(sizes, st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=9))))
def test_ranks_that_report_at_different_batches_of_an_epoch_lose_no_row(
    total: int, attempts: list[tuple[int, list[tuple[int, bool]]]]
) -> None:
    seen: list[int] = []
    consumed: list[Stretch] = []
    for size, ranks in attempts:
        world, left = len(ranks), remaining(total, consumed)
        before = [stretch.to_json() for stretch in consumed]
        found: list[Any] = []
        for rank, (wanted, is_at_end) in enumerate(ranks):
            plan = Batches.of(length(left), world, rank, size, drop_last=False)
            done = min(wanted, plan.count)
            seen.extend(positions(cut(share(left, world, rank), 0, plan.done(done))))
            now = [[world, size, 0, done]] if done else []
            is_over = is_at_end and done == plan.count
            found.append((1, [], 0) if is_over else (0, before + now, len(before)))
        if all(epoch for epoch, *_ in found):
            assert sorted(seen) == list(range(total))
            return
        epoch, consumed = united(found)
        assert epoch == 0
        assert sorted(seen + positions(remaining(total, consumed))) == list(range(total))


def test_a_position_without_a_batch_leaves_the_next_attempt_its_choice_of_an_order() -> None:
    assert united([(1, [], 0)] * 2) == (1, [])
    assert united([(0, [[3, 8, 0, [2, 2, 1]]], 1)] * 2)[1] == [Stretch(3, 8, False, (2, 2, 1))]
    # Of an earlier version.
    assert united([(0, [[3, 8, 0, [2, 2, 1]]])] * 2)[1] == [Stretch(3, 8, False, (2, 2, 1))]
