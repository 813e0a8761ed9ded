"""Every row of an epoch once, and the same number of batches on every rank, whatever the world does meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from rankzero.data.shares import Batches, split

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
