"""What an existing run means, as a table: no processes, no clocks."""

import itertools

import pytest

from rankzero.run.identity import Decision, decide
from rankzero.run.tries import lease, longest_delay, power

ATTACH, DELIVER, RESUME, FRESH = Decision

FACTS = {"same": "same_training", "repeated": "same_generation"}
FACTS |= {name: name for name in ("acknowledged", "automatic")}


@pytest.mark.parametrize(
    ("state", "facts", "decision"),
    [
        pytest.param("pending", "same", ATTACH, id="submitted, its driver not there yet"),
        pytest.param("running", "same", ATTACH, id="it lives"),
        pytest.param("failed", "same", RESUME, id="it failed, or its driver died"),
        pytest.param("cancelled", "same", RESUME, id="it was ended"),
        pytest.param("failed", "same acknowledged", FRESH, id="a submission after a delivery died half-way"),
        pytest.param("failed", "same acknowledged repeated", RESUME, id="the same, by itself"),
        pytest.param("succeeded", "same", DELIVER, id="nobody has got the result"),
        pytest.param("succeeded", "same acknowledged", FRESH, id="a user runs again what had succeeded"),
        pytest.param("succeeded", "same acknowledged repeated", DELIVER, id="an orchestrator does, by itself"),
        pytest.param("running", "automatic", ATTACH, id="it lives"),
        pytest.param("succeeded", "automatic", DELIVER, id="nobody has got the result"),
        pytest.param("succeeded", "acknowledged automatic", FRESH, id="a delivered result is not given twice"),
        pytest.param("failed", "automatic", FRESH, id="its checkpoints are of other arguments"),
    ],
)
def test_what_an_existing_run_means(state: str, facts: str, decision: Decision) -> None:
    known = {name: word in facts.split() for word, name in FACTS.items()}
    assert decide(state, **known) is decision


@pytest.mark.parametrize("state", ["pending", "starting", "running", "succeeded", "failed", "cancelled"])
def test_another_training_lends_nothing(state: str) -> None:
    for acknowledged, repeated in itertools.product([False, True], repeat=2):
        decided = decide(state, same_training=False, acknowledged=acknowledged, same_generation=repeated)
        assert decided is FRESH


@pytest.mark.parametrize(
    ("delay", "unnoticed", "least", "seconds"),
    [(0.0, 0.0, 900.0, 900), (600.0, 0.0, 900.0, 1500), (0.0, 300.0, 900.0, 1200), (0.0, 0.0, 1800.0, 1800)],
)
def test_a_lease_outlasts_the_wait_for_the_next_try(
    delay: float, unnoticed: float, least: float, seconds: float
) -> None:
    assert lease(delay, unnoticed=unnoticed, least=least) == seconds


def test_delays_that_grow_have_a_bound() -> None:
    assert longest_delay(600, 1) == 600
    assert longest_delay(600, power(2, 3)) == 4800
    assert longest_delay(600, power(2.0, 9999)) == 24 * 3600
    assert longest_delay(48 * 3600, 2) == 48 * 3600
    assert longest_delay(0, power(2.0, 9999)) == 0
