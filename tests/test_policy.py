"""Decisions, as tables: no processes, no clocks."""

import pytest

from rankzero import policy
from rankzero.policy import Failure

RAISED = Failure(1, "b", order=1, exception_type="ValueError", message="bad")
ECHO = Failure(0, "a", order=0, exception_type="RuntimeError", message="Connection closed by peer", collateral=True)
KILLED = Failure(2, "c", order=2, signal="SIGKILL")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([RAISED], RAISED),
        ([ECHO], ECHO),
        ([ECHO, RAISED], RAISED),
        ([ECHO, KILLED], KILLED),
        ([RAISED, KILLED], RAISED),
        ([KILLED, RAISED, ECHO], RAISED),
    ],
)
def test_the_first_cause_is_the_earliest_that_is_no_echo(failures: list[Failure], cause: Failure) -> None:
    assert policy.first_cause(failures) is cause


@pytest.mark.parametrize(
    ("failures", "waited", "settled"),
    [
        ([RAISED], 0.0, True),
        ([KILLED], 0.0, True),
        ([ECHO], 0.0, False),
        ([ECHO], policy.CAUSE_WINDOW, True),
        ([ECHO, RAISED], 0.1, True),
    ],
)
def test_only_an_echo_is_waited_for(failures: list[Failure], waited: float, settled: bool) -> None:
    assert policy.is_settled(failures, waited) is settled


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        (["a"], [0]),
        (["a", "b"], [0, 1]),
        (["a", "b", "a", "b"], [0, 2, 1, 3]),
        (["b", "a", "b"], [0, 2, 1]),
    ],
)
def test_ranks_are_numbered_host_by_host(hosts: list[str], order: list[int]) -> None:
    assert policy.order_tasks(hosts) == order


def test_equal_failures_are_grouped_and_consequences_are_marked() -> None:
    echoes = [Failure(rank, "a", order=rank, exception_type="E", message="gone", collateral=True) for rank in (0, 3, 2)]
    assert policy.group_others([RAISED, *echoes], RAISED) == ["rank 0, 2, 3: E: gone (a consequence)"]


def test_the_message_leads_with_rank_host_and_cause() -> None:
    text = policy.failure_message(KILLED, ["rank 0: E"], ["last words"], "/store/run")
    assert text.startswith("rank 2 on c failed: killed by SIGKILL (often the kernel's out-of-memory killer)")
    assert "  last words" in text
    assert "rank 0: E" in text
    assert text.endswith("/store/run/logs")


@pytest.mark.parametrize(
    ("age", "unchanged", "dead"),
    [
        (0.0, 0.0, False),
        (14.9, 14.9, False),
        (16.0, 15.1, True),
        (60.0, 1.0, False),  # the reader's clock is a minute ahead
        (-60.0, 15.1, True),  # or behind
        (3600.0, 0.0, True),
    ],
)
def test_a_driver_whose_heartbeat_stands_still_is_dead(age: float, unchanged: float, dead: bool) -> None:
    assert policy.driver_is_dead(1000.0, 1000.0 + age, unchanged) is dead
