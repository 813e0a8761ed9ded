"""A process is killed at an operation, or a store answers wrongly: nothing promised is lost.

The next call does what docs/tries.md says. The points are a sample of those that `make crash-points` enumerates.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.crash.bench import SCENARIOS, Bench
from tests.faults.crash.points import answers_of, points_of, spread

POINTS = {"run": 2, "detached restart": 2, "resubmit": 2}
"""Points of each scenario that every suite tries."""

ANSWERS = {"run": 2}
"""The same, of the wrong answers of an object store."""


def open_bench(folder: Path, root: str | None = None) -> Bench:
    for part in ("bench", "notes"):
        (folder / part).mkdir()
    return Bench(folder / "bench", folder / "notes", f"crash-{folder.name}-{id(folder)}", root)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = open_bench(tmp_path_factory.mktemp("crash"))
    yield bench
    bench.close()


@pytest.mark.parametrize(
    ("scenario", "count"),
    [*POINTS.items(), *(pytest.param(name, 20, marks=pytest.mark.soak) for name in SCENARIOS)],
)
def test_a_kill_at_any_operation_loses_nothing_and_leaves_nothing(local: Bench, scenario: str, count: int) -> None:
    points = points_of(local.record(SCENARIOS[scenario]))
    reached = sum(local.hurt(SCENARIOS[scenario], *point) for point in spread(points, count))
    assert reached, "no process came to any of the points"


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        *ANSWERS.items(),
        *(pytest.param(name, 20, marks=pytest.mark.soak) for name in ("run", "restart", "cancel", "resubmit")),
    ],
)
def test_a_wrong_answer_of_a_store_loses_nothing(bucket: str, tmp_path: Path, scenario: str, count: int) -> None:
    bench = open_bench(tmp_path, bucket)
    try:
        points = answers_of(bench.record(SCENARIOS[scenario]))
        reached = sum(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, count))
    finally:
        bench.close()
    assert reached, "no process came to any of the points"
