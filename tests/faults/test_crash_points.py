"""A process is killed at an operation, or a store answers wrongly: nothing promised is lost.

The next call does what docs/tries.md says. The points are a sample of those that `make crash-points` enumerates.
"""

from collections.abc import Iterator

import pytest
from tests.faults.crash.bench import SCENARIOS, Bench, Point, answers_of, points_of, spread
from tests.s3 import S3Server

POINTS = {"run": 2, "detached restart": 1, "resubmit": 1}
"""Points of each scenario that every suite tries; the nightly one tries twenty of all scenarios."""

ANSWERS = {"run": 2}
"""The same, of the wrong answers of an object store."""

SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]
"""A driver that is killed before its first status counts as dead after 60 s, for each action that waits for its end."""


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


def hurt(bench: Bench, scenario: str, points: list[Point], count: int) -> None:
    """Tries so many points, and five others if none comes again: a slow run has heartbeats and polls of its own."""
    for number in (count, 5):
        if sum(bench.hurt(SCENARIOS[scenario], *point) for point in spread(points, number)):
            return
    pytest.fail("no process came to any of the points")


@pytest.mark.parametrize(
    ("scenario", "count"),
    [*POINTS.items(), *(pytest.param(name, 20, marks=SOAK) for name in SCENARIOS)],
)
def test_a_kill_at_any_operation_loses_nothing_and_leaves_nothing(bench: Bench, scenario: str, count: int) -> None:
    hurt(bench, scenario, points_of(bench.record(SCENARIOS[scenario])), count)


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        *ANSWERS.items(),
        *(pytest.param(name, 20, marks=SOAK) for name in ("run", "restart", "cancel", "resubmit")),
    ],
)
def test_a_wrong_answer_of_a_store_loses_nothing(
    bench: Bench, bucket: str, monkeypatch: pytest.MonkeyPatch, scenario: str, count: int
) -> None:
    monkeypatch.setattr(bench, "root", bucket)
    hurt(bench, scenario, answers_of(bench.record(SCENARIOS[scenario])), count)
