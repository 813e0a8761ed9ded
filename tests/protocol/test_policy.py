"""Decisions, as tables: no processes, no clocks."""

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.runs import job

from rankzero import errors
from rankzero.channel.messages import Failed, Stack
from rankzero.driver import attempt, ending
from rankzero.driver.agents import order_tasks
from rankzero.driver.ending import Facts, Failure
from rankzero.driver.places import GROWTH_TIMEOUT, tasks_to_start, waiting_message
from rankzero.driver.watch import HangWatch
from rankzero.run import observer
from rankzero.run.directory import RunDirectory, Submission
from rankzero.run.status import RunStatus


def failure(rank: int, host: str, **facts: Any) -> Failure:
    return Failure(rank, host, host, Failed(0.0, **facts))


RAISED = failure(1, "b", exception_type="ValueError", message="bad")
ECHO = failure(0, "a", exception_type="RuntimeError", message="Connection closed by peer", collateral=True)
KILLED = failure(2, "c", signal="SIGKILL", log_tail=["last lines"])


def test_equal_failures_are_grouped_and_consequences_are_marked() -> None:
    echoes = [
        failure(rank, "a", exception_type="E", message=f"peer {rank} is lost", collateral=True) for rank in (0, 3, 2)
    ]
    assert ending.group_others([RAISED, *echoes], RAISED) == ["ranks 0, 2, 3: E: peer 0 is lost (a consequence)"]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([5, 1, 2, 3], "ranks 1-3, 5"), (range(64), "ranks 0-63")],
)
def test_ranks_are_named_in_runs(ranks: list[int], name: str) -> None:
    assert ending.name_ranks(ranks) == name


def test_the_message_leads_with_rank_host_and_cause() -> None:
    facts = ending.Facts(9, "/store/run")
    for one in (KILLED, replace(KILLED, rank=5), replace(KILLED, rank=6), RAISED):
        facts.note_failure(one)
    text = str(ending.failed(facts, {}).error)
    assert text.startswith("rank 2 on c failed: killed by SIGKILL (often the kernel's out-of-memory killer)")
    assert "  last lines" in text
    assert "Then failed:\n  ranks 5, 6: the same\n" in text
    assert "rank 1: ValueError: bad" in text
    assert text.endswith("\nLogs of all ranks: rankzero logs /store/run")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (RAISED, None),
        (failure(0, "a", exit_code=9), errors.LOST),
        (failure(0, "a", exception_type="SystemExit", message="3", exit_code=3), None),
        (failure(0, "a", message="it closed the connection to its agent", exit_code=1), None),
        (failure(0, "a", exception_type="rankzero.errors.RetryableError", retryable=True), errors.RETRYABLE),
        (KILLED, errors.KILLED),
        (failure(0, "a", signal="SIGSEGV"), errors.KILLED),
        (failure(0, "a", signal="SIGTERM"), errors.PREEMPTED),
        (ECHO, errors.LOST),
    ],
)
def test_what_a_restart_is_decided_by(failure: Failure, cause: str | None) -> None:
    assert failure.restart_cause == cause


@pytest.mark.parametrize(
    ("max_restarts", "max_preemptions", "causes", "pauses"),
    [
        (0, 0, ["killed"], [None]),
        (3, 0, ["killed", "lost", "hang", "retryable"], [0, 1, 3, None]),
        (1, 1, ["preempted", "killed", "preempted"], [0, 0, None]),
        (9, 9, [None], [None]),
        (20, 0, ["lost"] * 9, [0, 1, 3, 7, 15, 31, 60, 60, 60]),
    ],
)
def test_restarts_and_preemptions_have_budgets_of_their_own(
    max_restarts: int, max_preemptions: int, causes: list[str | None], pauses: list[float | None]
) -> None:
    budget = ending.Restarts(max_restarts, max_preemptions)
    for cause, expected in zip(causes, pauses, strict=True):
        after = budget.after(cause)
        assert (after and after[1]) == expected
        if after:
            budget = after[0]


COLLECTIVE = 'File "/torch/distributed/distributed_c10d.py", line 3000 in all_reduce\nFile "train.py", line 9 in step'
ELSEWHERE = 'File "train.py", line 7 in load'


def test_a_hang_names_who_had_not_joined_and_shows_equal_stacks_once() -> None:
    hangs = HangWatch(Facts(3, ""))
    hangs.begin(0.0)
    hangs.stacks |= {rank: Stack(ELSEWHERE if rank == 1 else COLLECTIVE) for rank in range(3)}
    found = hangs.find(1e6, 5.0)
    assert found
    error = ending.hung(found[0], hangs.texts, found[1], "/store/run")
    text = str(error)
    assert error.missing == [1]
    assert "rank 1 had not joined the collective in which ranks 0, 2 waited" in text
    assert text.index("rank 1 stood at:") < text.index("ranks 0, 2 stood at:")
    assert text.count("all_reduce") == 1
    hangs.stacks = dict.fromkeys(range(3), Stack(ELSEWHERE))
    assert hangs.find(1e6, 5.0) == (found[0], []), "no rank waits"


@pytest.mark.parametrize(("hosts", "order"), [("a", [0]), ("abab", [0, 2, 1, 3]), ("ba", [0, 1]), ("aba", [0, 2, 1])])
def test_ranks_are_numbered_host_by_host(hosts: str, order: list[int]) -> None:
    assert order_tasks(list(hosts)) == order


@pytest.mark.parametrize(
    ("age", "unchanged", "dead"),
    [
        (0.0, 0.0, False),
        (59.9, 59.9, False),
        (61.0, 60.1, True),
        (60.0, 1.0, False),  # the reader's clock is a minute ahead
        (-60.0, 60.1, True),  # or behind
        (3600.0, 0.0, True),
    ],
)
def test_a_driver_whose_heartbeat_stands_still_is_dead(
    age: float, unchanged: float, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = observer.Observer(Submission(RunDirectory("memory://runs/one"), job()))
    status, began = RunStatus(heartbeat=time.time() - age), time.monotonic()
    is_dead = watch._is_silent(status)
    if not is_dead:
        monkeypatch.setattr(time, "monotonic", lambda: began + unchanged)
        is_dead = watch._is_silent(status)
    assert is_dead is dead


NOW, PATIENT = 0.0, GROWTH_TIMEOUT()


@pytest.mark.parametrize(
    ("slots", "least", "most", "unchanged", "placed"),
    [
        # A fixed size waits for as long as it takes, and for nothing else.
        (3, 4, 4, 1e9, None),
        (4, 4, 4, NOW, 4),
        (9, 4, 4, NOW, 4),
        # An elastic one takes all it wants at once, and less when no more has come for a while.
        (8, 2, 8, NOW, 8),
        (9, 2, 8, NOW, 8),
        (5, 2, 8, NOW, None),
        (5, 2, 8, PATIENT, 5),
        (1, 2, 8, 1e9, None),
    ],
)
def test_with_what_an_attempt_starts(slots: int, least: int, most: int, unchanged: float, placed: int | None) -> None:
    assert tasks_to_start(slots, least, most, unchanged, NOW, 600.0) == placed


@pytest.mark.parametrize(
    ("slots", "unchanged", "waited", "bound", "starts"),
    [
        # A quarter of the bound without a new slot, where that is less than the patience.
        (5, 4.9, 4.9, 20.0, False),
        (5, 5.0, 5.0, 20.0, True),
        (5, 29.9, 29.9, 600.0, False),
        # Slots come and come, but the ranks need time to start.
        (5, NOW, 9.9, 20.0, False),
        (5, NOW, 10.0, 20.0, True),
        (5, NOW, 299.9, 600.0, False),
        (5, NOW, 300.0, 600.0, True),
        # Not enough is not enough.
        (1, 19.9, 19.9, 20.0, False),
    ],
)
def test_an_elastic_attempt_leaves_its_ranks_time_to_start(
    slots: int, unchanged: float, waited: float, bound: float, starts: bool
) -> None:
    assert (tasks_to_start(slots, 2, 8, unchanged, waited, bound) is not None) is starts


@pytest.mark.parametrize(
    ("slots", "least", "most", "words"),
    [
        (1, 2, 2, "offers 1 of the 2 task slots that this run needs at the same time, after 31 s"),
        (0, 2, 8, "offers 0 of the 2 to 8 task slots that this run needs at the same time"),
    ],
)
def test_what_is_waited_for_is_said(slots: int, least: int, most: int, words: str) -> None:
    assert words in waiting_message("the cluster at 'yarn'", slots, least, most, 31.2, 600.0)


@pytest.mark.parametrize(
    ("tasks", "ranks", "words"),
    [
        ([1, 2, 3], [], "1 of 4 tasks have started, not tasks 1-3 (are its slots in use?)"),
        ([], [2], "every task has started, but rank 2 still imports torch"),
        ([], [], "every task has started, but no rank has begun"),
    ],
)
def test_why_an_attempt_has_not_started_is_said(tasks: list[int], ranks: list[int], words: str) -> None:
    assert words in attempt.starting_message(4, tasks, ranks)


MATCHED = failure(3, "d", exception_type="RuntimeError", message="CUDA error 700", matched="CUDA error")
SAME = replace(MATCHED, report=replace(MATCHED.report, message="CUDA error 9"))


@pytest.mark.parametrize(
    ("failures", "host"),
    [
        ([KILLED], "two"),
        ([MATCHED], "three"),
        ([MATCHED, KILLED], "three"),
        ([ECHO, KILLED], "two"),
        # Nobody knows whose fault that was.
        ([ECHO], None),
        ([RAISED], None),
        ([failure(2, "c", exception_type="RetryableError", retryable=True)], None),
        ([failure(2, "c", signal="SIGTERM")], None),
        # The same on two hosts is the code's fault; on one host of several ranks it is that host's.
        (
            [MATCHED, replace(SAME, rank=4, host="e")],
            None,
        ),
        (
            [MATCHED, replace(SAME, rank=5)],
            "three",
        ),
    ],
)
def test_which_host_is_to_blame(failures: list[Failure], host: str | None) -> None:
    hosts = {0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 5: "three"}
    placed = [replace(failure, placed_on=hosts[failure.rank]) for failure in failures]
    assert ending.failed(Facts(6, "", failures=placed), {}).blamed == host
