"""When an attempt has succeeded, and why it cannot any more: no process, no clock."""

from typing import Any

import pytest

from rankzero import ResultError, ResultRef
from rankzero.bounds import LOG_TAIL_WIDTH
from rankzero.driver import Member, Outcome, Reason, failure, policy

REF = ResultRef("/store/value-0.json", "json", "0" * 64, 4)

NOW = 100.0
JUST, LONG_AGO = NOW - 0.01, NOW - policy.AGENT_LOST_WINDOW - 0.01
LONG_BEFORE = NOW - failure.CAUSE_WINDOW - 0.01


def member(task: int, left_at: float | None = None, disconnected_at: float | None = None) -> Member:
    found = Member(task, "a", "a", "a", "3.11.7", [], 1)
    found.left_at, found.disconnected_at = left_at, disconnected_at
    return found


def failed(outcome: Outcome, rank: int, at: float = JUST, *, was_asked_to: bool = False, **facts: Any) -> None:
    outcome.note_failure(rank, "a", facts, at, was_asked_to=was_asked_to)


def test_success_is_every_ranks_commit_and_rank_0s_value() -> None:
    outcome = Outcome(2)
    outcome.note_committed(1)
    outcome.note_committed(1)
    assert outcome.success is None
    outcome.note_result(0, REF, [None])
    assert outcome.success == (REF, [None])


def test_what_was_given_up_is_no_success_whatever_still_comes() -> None:
    outcome = Outcome(1)
    outcome.give_up()
    outcome.note_result(0, REF, [None])
    assert outcome.success is None


def test_it_is_over_when_every_rank_has_said_its_last_or_is_gone() -> None:
    outcome = Outcome(2)
    outcome.note_over(1)
    outcome.note_over(1)
    assert not outcome.is_over
    outcome.note_over(0)
    assert outcome.is_over


def test_an_agent_whose_ranks_have_all_committed_is_no_loss() -> None:
    outcome, gone = Outcome(4), member(1, LONG_AGO)
    gone.first_rank, gone.workers = 2, 2
    outcome.note_committed(2)
    assert outcome.reason(NOW, [gone], engine_ended=False) is gone
    outcome.note_committed(3)
    assert outcome.reason(NOW, [gone], engine_ended=False) is None
    # Its peers may have needed it, though: their broken connections are explained by that.
    failed(outcome, 0, LONG_BEFORE, collateral=True)
    assert outcome.reason(NOW, [gone], engine_ended=False) is gone


def test_the_value_alone_is_no_success() -> None:
    outcome = Outcome(2)
    outcome.note_result(0, REF, [])
    assert outcome.success is None


def test_a_rank_that_committed_cannot_fail_any_more() -> None:
    outcome = Outcome(2)
    outcome.note_committed(1)
    failed(outcome, 1)
    assert outcome.failures == []
    assert outcome.reason(NOW, [], engine_ended=False) is None


def test_a_failure_keeps_the_order_in_which_it_was_heard_and_what_is_known() -> None:
    outcome = Outcome(2)
    failed(outcome, 1, message="first", exit_code=None, log_tail=["x" * 2 * LOG_TAIL_WIDTH])
    failed(outcome, 0, was_asked_to=True, message="then", collateral=False)
    first, then = outcome.failures
    assert (first.rank, first.order, first.message, first.collateral) == (1, 0, "first", False)
    assert len(first.log_tail[0]) == LOG_TAIL_WIDTH
    assert (then.rank, then.order, then.collateral) == (0, 1, True)


LEFT, LEFT_JUST_NOW, DISCONNECTED = member(1, LONG_AGO), member(2, JUST), member(3, disconnected_at=LONG_AGO)


@pytest.mark.parametrize(
    ("failures", "refused", "gone", "engine_ended", "reason"),
    [
        ([], False, [], False, None),
        # Ranks: what is no echo decides at once, an echo after a moment.
        ([(JUST, False)], False, [], False, Reason.RANKS_FAILED),
        ([(JUST, True)], False, [], False, None),
        ([(LONG_BEFORE, True)], False, [], False, Reason.RANKS_FAILED),
        ([(LONG_BEFORE, True), (JUST, False)], False, [LEFT], False, Reason.RANKS_FAILED),
        # Echoes of a lost agent are explained by that.
        ([(LONG_BEFORE, True)], False, [DISCONNECTED], False, DISCONNECTED),
        ([(JUST, True)], False, [DISCONNECTED], False, None),
        # Agents: who went is waited for, who is disconnected may come back.
        ([], False, [LEFT], False, LEFT),
        ([], False, [LEFT_JUST_NOW], False, None),
        ([], False, [DISCONNECTED], False, None),
        ([], False, [DISCONNECTED, LEFT_JUST_NOW, LEFT], False, LEFT),
        # The engine: what an agent said before it went says more.
        ([], False, [], True, Reason.ENGINE_ENDED),
        ([], False, [LEFT_JUST_NOW], True, LEFT_JUST_NOW),
        ([], False, [DISCONNECTED], True, Reason.ENGINE_ENDED),
        ([(JUST, True)], False, [], True, None),
        # The driver's own errors.
        ([], True, [LEFT], True, Reason.REFUSED),
        ([(JUST, False)], True, [], False, Reason.RANKS_FAILED),
    ],
)
def test_why_an_attempt_cannot_succeed_any_more(
    failures: list[tuple[float, bool]],
    refused: bool,
    gone: list[Member],
    engine_ended: bool,
    reason: Reason | Member | None,
) -> None:
    outcome = Outcome(4)
    for rank, (at, collateral) in enumerate(failures):
        failed(outcome, rank, at, collateral=collateral)
    if refused:
        outcome.refusal = ResultError("the store is full")
    assert outcome.reason(NOW, gone, engine_ended=engine_ended) == reason
