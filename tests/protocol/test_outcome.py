"""When an attempt has succeeded, and why it cannot any more: no process, no clock."""

from typing import Any

import pytest

from rankzero import EngineError, RankZeroError, ResultError, ResultRef, RunCancelledError, WorkerFailedError
from rankzero.channel.messages import Failed
from rankzero.driver import ending
from rankzero.driver.ending import Facts, Failure, Member, Verdict
from rankzero.errors import KILLED, LOST, MATCHED, PREEMPTED

REF = ResultRef("/store/value-0.json", "json", "0" * 64, 4)

REFUSAL = ResultError("the store is full")


def facts(num_processes: int = 2) -> Facts:
    return Facts(num_processes, "/store/run")


def member(task: int, why: str | None = None, cause: str = LOST) -> Member:
    found = Member(task, f"host-{task}", "a", f"name-{task}", "3.11.7", [], 1, first_rank=task)
    if why:
        found.leave(why, cause)
    return found


def judged(
    known: Facts, gone: list[Member] | None = None, *, in_window: bool = False, stacks: dict[int, str] | None = None
) -> Verdict | None:
    """The verdict of an attempt that has ended; in the window for the first cause only if nothing can change it."""
    if not known.success and not ending.cannot_succeed(known, gone or []):
        return None
    if in_window and not ending.is_certain(known):
        return None
    stacks = {rank: f"stack of {rank}" for rank in range(known.num_processes)} if stacks is None else stacks
    explained = EngineError(f"the engine: {known.engine_error or 'the agents ended'}", cause=LOST)
    return ending.judge(known, gone or [], explained if known.engine_ended else None, stacks)


def failed(known: Facts, rank: int, **details: Any) -> bool:
    return known.note_failure(Failure(rank, "a", f"host-{rank}", Failed(0.0, **details)))


def test_success_is_every_ranks_end_and_rank_0s_value() -> None:
    known = facts()
    known.note_stored(REF, [None])
    assert judged(known) is None
    known.finished.add(1)
    assert judged(known) == Verdict(success=(REF, [None]))


def test_no_later_event_takes_a_success_back() -> None:
    known = facts(1)
    known.note_stored(REF, [])
    known.refusal, known.engine_ended = REFUSAL, True
    assert judged(known, [member(0, "it exited")]) == Verdict(success=(REF, []))


def test_an_agent_whose_ranks_have_all_finished_is_no_loss() -> None:
    known, gone = facts(4), member(1, "it exited")
    gone.first_rank, gone.workers = 2, 2
    known.finished.add(2)
    assert is_loss_of(judged(known, [gone]), gone)
    known.finished.add(3)
    assert judged(known, [gone]) is None
    # Unless the attempt has been judged to fail before that.
    assert is_loss_of(ending.judge(known, [gone], None, {}), gone)
    # Its peers may have needed it, though: their broken connections are explained by that.
    failed(known, 0, collateral=True)
    assert is_loss_of(judged(known, [gone]), gone)


def test_a_rank_that_finished_cannot_fail_any_more() -> None:
    known = facts()
    known.finished.add(1)
    assert not failed(known, 1)
    assert known.failures == []
    assert judged(known) is None


def test_the_first_failure_has_the_last_lines() -> None:
    known = facts()
    assert failed(known, 1, message="first", log_tail=["the last line of rank 1"])
    assert failed(known, 0, message="then", log_tail=["its own last line"])
    verdict = judged(known)
    assert verdict
    assert isinstance(verdict.error, WorkerFailedError)
    assert (verdict.error.rank, verdict.error.log_tail) == (1, ["the last line of rank 1"])
    assert "then" in str(verdict.error)


def is_loss_of(verdict: Verdict | None, agent: Member) -> bool:
    return verdict is not None and f"task {agent.task} on {agent.name}" in str(verdict.error)


LEFT, OTHER = member(1, "it exited"), member(2, "it is silent")
RANK, ENGINE = "rank 0 on a failed", "the engine: the agents ended"


@pytest.mark.parametrize(
    ("failures", "refused", "gone", "engine_ended", "is_certain", "end"),
    [
        ([], False, [], False, False, None),
        # Ranks: a failure of their own decides immediately, a consequence after the window.
        ([False], False, [], False, True, RANK),
        ([True], False, [], False, False, RANK),
        ([True, False], False, [LEFT], False, True, "rank 1 on a failed"),
        # Consequences of a lost agent are explained by that.
        ([True], False, [LEFT], False, False, LEFT),
        ([], False, [LEFT], False, False, LEFT),
        ([], False, [OTHER, LEFT], False, False, OTHER),
        # The engine: an agent's own reason says more.
        ([], False, [], True, True, ENGINE),
        ([], False, [LEFT], True, True, LEFT),
        ([True], False, [], True, True, RANK),
        # The driver's own errors.
        ([], True, [LEFT], True, True, REFUSAL),
        ([], True, [], False, True, REFUSAL),
        ([False], True, [], False, True, RANK),
    ],
)
def test_why_an_attempt_cannot_succeed_any_more(
    failures: list[bool],
    refused: bool,
    gone: list[Member],
    engine_ended: bool,
    is_certain: bool,
    end: Member | RankZeroError | str | None,
) -> None:
    known = facts(4)
    for rank, collateral in enumerate(failures):
        failed(known, rank, collateral=collateral)
    known.refusal = REFUSAL if refused else None
    known.engine_ended = engine_ended
    verdict = judged(known, gone)
    assert ending.is_certain(known) is is_certain
    assert (judged(known, gone, in_window=True) is not None) is is_certain
    if end is None:
        assert verdict is None
    elif isinstance(end, Member):
        assert is_loss_of(verdict, end)
    elif isinstance(end, RankZeroError):
        assert verdict == Verdict(error=end)
    else:
        assert verdict
        assert end in str(verdict.error)


@pytest.mark.parametrize(
    ("left", "engine_error", "cause", "blamed"),
    [
        (LOST, None, LOST, "host-1"),
        (PREEMPTED, None, PREEMPTED, None),
        (PREEMPTED, RuntimeError("executor 1 was lost"), LOST, None),
    ],
)
def test_the_host_of_a_lost_agent_is_blamed_unless_it_was_preempted_and_the_engine_decides_about_a_restart(
    left: str, engine_error: BaseException | None, cause: str, blamed: str | None
) -> None:
    known = facts()
    known.engine_ended, known.engine_error = engine_error is not None, engine_error
    verdict = judged(known, [member(1, "it got SIGTERM", left)])
    assert verdict
    assert isinstance(verdict.error, EngineError)
    assert (verdict.error.cause, verdict.blamed) == (cause, blamed)
    assert ("executor 1 was lost" in str(verdict.error)) is (engine_error is not None)


@pytest.mark.parametrize(("matched", "cause"), [("ResultError", MATCHED), (None, None)])
def test_a_result_error_of_a_rank_restarts_the_run_where_restart_on_names_it(
    matched: str | None, cause: str | None
) -> None:
    known = facts()
    failed(known, 0, exception_type="rankzero.errors.ResultError", message="it is damaged", matched=matched)
    verdict = judged(known)
    assert verdict
    assert getattr(verdict.error, "cause", None) == cause
    assert isinstance(verdict.error, WorkerFailedError if matched else ResultError)


def test_a_consequence_shows_where_the_others_stood() -> None:
    known = facts()
    failed(known, 0, collateral=True)
    verdict = judged(known)
    assert verdict
    assert "rank 1 had not failed.\nrank 1 stood at:\n  stack of 1" in str(verdict.error)


@pytest.mark.parametrize("what", ["over", "engine"])
def test_a_consequence_counts_without_ranks_that_may_know_more(what: str) -> None:
    known = facts()
    failed(known, 0, collateral=True)
    known.over.update([0, 1] if what == "over" else [0])
    known.engine_ended = what == "engine"
    verdict = judged(known, in_window=True)
    assert verdict
    assert "Only consequences are known" in str(verdict.error)
    assert "had not failed" not in str(verdict.error)


@pytest.mark.parametrize(
    ("first", "then", "cause"),
    [
        ({"collateral": True}, {"exception_type": "KeyError"}, None),
        ({"collateral": True}, {"signal": "SIGKILL"}, KILLED),
        ({"collateral": True}, {"collateral": True}, LOST),
        ({"exception_type": "KeyError"}, {"signal": "SIGKILL"}, None),
    ],
)
def test_a_report_that_arrives_while_ranks_are_stopped_corrects_the_cause_and_the_restart(
    first: dict[str, Any], then: dict[str, Any], cause: str | None
) -> None:
    known = facts()
    failed(known, 0, **{"exception_type": "E", **first})
    verdict = judged(known)
    assert verdict
    failed(known, 1, **then)
    error = ending.settled(verdict, known).error
    assert isinstance(error, WorkerFailedError)
    assert (error.rank, error.cause) == (1 if "collateral" in first and "collateral" not in then else 0, cause)


def test_no_report_takes_back_that_a_run_was_cancelled() -> None:
    known, verdict = facts(), Verdict(error=RunCancelledError("it was cancelled"))
    failed(known, 1, exception_type="KeyError")
    assert ending.settled(verdict, known) is verdict


@pytest.mark.parametrize(
    ("host", "address", "for_one_host", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True, ["127.0.0.1"]),
        ("127.0.0.1", "10.0.0.1", False, ["10.0.0.1"]),
        ("localhost", "localhost", False, ["localhost"]),
        ("a", "10.0.0.1", False, ["a", "10.0.0.1"]),
    ],
)
def test_where_others_reach_an_agent(host: str, address: str, for_one_host: bool, found: list[str]) -> None:
    assert Member(0, host, address, "a", "3.11.7", [], 1).addresses(for_one_host=for_one_host) == found


@pytest.mark.parametrize(
    ("python", "gpus", "use_gpu", "why"),
    [
        ("3.11.7", [], False, None),
        ("3.11.0rc1", ["0", "1"], True, None),
        ("3.12.1", [], False, "point spark.pyspark.python to a Python 3.11"),
        ("3.1.7", [], False, "runs Python 3.1.7"),
        ("3.11.7", ["0"], True, "was given the GPUs ['0'] for 2 ranks"),
        ("3.11.7", ["0"], False, None),
    ],
)
def test_who_cannot_run_ranks_of_the_job(python: str, gpus: list[str], use_gpu: bool, why: str | None) -> None:
    found = Member(0, "a", "a", "a", python, gpus, 2).why_unfit("3.11", use_gpu)
    assert (found is None) if why is None else (why in str(found))
