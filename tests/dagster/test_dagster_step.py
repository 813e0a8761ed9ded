"""What a try is to the tries before it, and how long its training waits for the next: decisions, without processes."""

import dagster as dg
import pytest

from dagster_rankzero.step import goes_on, lease, run_id_of, tries_left

POLICY = dg.RetryPolicy


@pytest.mark.parametrize(
    ("state", "facts", "expected"),
    [
        pytest.param("running", "training generation", True, id="a step died, its training lives"),
        pytest.param("succeeded", "training generation", True, id="a step died before it got the result"),
        pytest.param("succeeded", "training generation handed", True, id="a step died while it stored the result"),
        pytest.param("failed", "training generation", True, id="a retry of a failed training"),
        pytest.param("failed", "training", True, id="re-executed after a failure"),
        pytest.param("failed", "training from_failure", True, id="re-executed from the failure"),
        pytest.param("running", "training", True, id="re-executed while the training still waits for a try"),
        pytest.param("succeeded", "training", True, id="re-executed, but nobody had got the result"),
        pytest.param("succeeded", "training handed", False, id="re-executed after a success"),
        pytest.param("succeeded", "training handed from_failure", True, id="got, but never stored"),
        pytest.param("running", "generation", False, id="the arguments have changed"),
        pytest.param("failed", "generation", False, id="the arguments have changed, after a failure"),
        pytest.param("succeeded", "generation from_failure", False, id="the arguments have changed, after a success"),
    ],
)
def test_what_goes_on_and_what_begins_anew(state: str, facts: str, expected: bool) -> None:
    decided = goes_on(
        state,
        same_training="training" in facts,
        same_generation="generation" in facts,
        from_failure="from_failure" in facts,
        handed="handed" in facts,
    )
    assert decided is expected


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (None, 900),
        (POLICY(max_retries=3), 900),
        (POLICY(max_retries=3, delay=600), 600 + 900),
        (POLICY(max_retries=3, delay=600, backoff=dg.Backoff.LINEAR), 3 * 600 + 900),
        (POLICY(max_retries=3, delay=600, backoff=dg.Backoff.EXPONENTIAL), 7 * 600 + 900),
        (POLICY(max_retries=3, delay=600, jitter=dg.Jitter.FULL), 600 + 900),
        (POLICY(max_retries=3, delay=600, jitter=dg.Jitter.PLUS_MINUS), 2 * 600 + 900),
        (POLICY(max_retries=99, delay=600, backoff=dg.Backoff.EXPONENTIAL), 24 * 3600 + 900),
        (POLICY(max_retries=9999, delay=600, backoff=dg.Backoff.EXPONENTIAL), 24 * 3600 + 900),
        (POLICY(max_retries=1, delay=48 * 3600), 48 * 3600 + 900),
    ],
)
def test_a_lease_is_as_long_as_the_next_try_may_take(policy: dg.RetryPolicy | None, seconds: float) -> None:
    assert lease(policy) == seconds


@pytest.mark.parametrize(
    ("policy", "number", "left"),
    [(None, 0, False), (POLICY(max_retries=1), 0, True), (POLICY(max_retries=1), 1, False)],
)
def test_the_last_try_is_known(policy: dg.RetryPolicy | None, number: int, left: bool) -> None:
    assert tries_left(policy, number) is left


def test_names_are_stable_distinct_and_can_name_directories() -> None:
    names = [
        run_id_of(root, key, call)
        for root in ("8f14e45f-1", "8f14e45f-2")
        for key in ("train", "train[1]", "train-1", "../deep." + "x" * 300)
        for call in (0, 1)
    ]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 200 and "/" not in name for name in names)
    assert names[0] == run_id_of("8f14e45f-1", "train", 0)
    assert names[0].startswith("8f14e45f-train-")
