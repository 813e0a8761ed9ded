"""A process is killed at an operation; what was promised is there, and the next call does what docs/tries.md says.

The points are a sample of those that `python -m tests.faults.crash` enumerates.
"""

from collections.abc import Iterator

import pytest
from tests.faults.crash.bench import SCENARIOS, Bench
from tests.faults.crash.points import points_of, spread

POINTS = {"run": 8, "submit": 6, "attach": 4, "failure": 4, "restart": 6, "detached restart": 4}
POINTS |= {"cancel": 4, "resubmit": 5, "gc": 3, "rows": 3, "sharded": 3}
"""Points of each scenario, 50 in all."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("crash")
    for part in ("bench", "notes"):
        (folder / part).mkdir()
    bench = Bench(folder / "bench", folder / "notes", f"crash-{folder.name}-{id(folder)}")
    yield bench
    bench.close()


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_operation_loses_nothing_and_leaves_nothing(bench: Bench, scenario: str) -> None:
    points = points_of(bench.record(SCENARIOS[scenario]))
    reached = sum(bench.kill(SCENARIOS[scenario], *point) for point in spread(points, POINTS[scenario]))
    assert reached, "no process came to any of the points"
