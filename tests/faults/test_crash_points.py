"""A process is killed at an operation, or a store answers wrongly: nothing promised is lost.

The next call does what docs/tries.md says. The points are a sample of those that `make crash-points` enumerates.
"""

from collections.abc import Iterator

import pytest
from tests.faults.crash.bench import SCENARIOS, Bench, answers_of, points_of, spread
from tests.s3 import S3Server

POINTS = {"run": 2, "detached restart": 1, "resubmit": 1}
"""Points of each scenario that every suite tries; the nightly one tries twenty of all scenarios."""

ANSWERS = {"run": 2}
"""The same, of the wrong answers of an object store."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Bench]:
    """One bench for all scenarios, so one program; its processes reach the object store, too."""
    folder = tmp_path_factory.mktemp("crash")
    for part in ("bench", "notes"):
        (folder / part).mkdir()
    made = Bench(folder / "bench", folder / "notes", f"crash-{folder.name}-{id(folder)}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        yield made
    made.close()


@pytest.mark.parametrize(
    ("scenario", "count"),
    [*POINTS.items(), *(pytest.param(name, 20, marks=pytest.mark.soak) for name in SCENARIOS)],
)
def test_a_kill_at_any_operation_loses_nothing_and_leaves_nothing(bench: Bench, scenario: str, count: int) -> None:
    points = points_of(bench.record(SCENARIOS[scenario]))
    reached = sum(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, count))
    if not reached:
        # A write that was due because the recorded run was slow, such as a heartbeat, need not come again.
        reached = any(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, 5))
    assert reached, "no process came to any of the points"


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        *ANSWERS.items(),
        *(pytest.param(name, 20, marks=pytest.mark.soak) for name in ("run", "restart", "cancel", "resubmit")),
    ],
)
def test_a_wrong_answer_of_a_store_loses_nothing(
    bench: Bench, bucket: str, monkeypatch: pytest.MonkeyPatch, scenario: str, count: int
) -> None:
    monkeypatch.setattr(bench, "root", bucket)
    points = answers_of(bench.record(SCENARIOS[scenario]))
    reached = sum(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, count))
    if not reached:
        # The same for polls, and for requests that were repeated.
        reached = any(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, 5))
    assert reached, "no process came to any of the points"
