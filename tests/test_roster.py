"""Who belongs to an attempt, and which ranks are whose: no process, no clock."""

from typing import Any

import pytest

from rankzero.channel.messages import Join
from rankzero.driver.roster import Member, Roster


def join(host: str, workers: int = 1, **changes: Any) -> Join:
    facts = {"host": host, "address": host, "hostname": host, "python": "3.11.7", "gpus": [], "workers": workers}
    return Join(**{**facts, "pid": 1, **changes})


def roster_of(*joins: Join, num_agents: int | None = None) -> Roster:
    roster = Roster(num_agents or len(joins), 1)
    for task, message in enumerate(joins):
        assert roster.join(task, message)
    return roster


@pytest.mark.parametrize(
    ("hosts", "workers", "first_ranks"),
    [
        ("a", [1], {0: 0}),
        ("abab", [1, 1, 1, 1], {0: 0, 2: 1, 1: 2, 3: 3}),
        ("ba", [2, 2], {0: 0, 1: 2}),
        ("aba", [4, 2, 1], {0: 0, 2: 4, 1: 5}),
    ],
)
def test_ranks_are_numbered_host_by_host(hosts: str, workers: list[int], first_ranks: dict[int, int]) -> None:
    roster = roster_of(*(join(host, count) for host, count in zip(hosts, workers, strict=True)))
    assert roster.is_complete
    ordered = roster.number()
    assert {member.task: member.first_rank for member in ordered} == first_ranks
    assert [member.task for member in ordered] == list(first_ranks)
    assert [roster.rank(member, 1) for member in ordered] == [first + 1 for first in first_ranks.values()]


def test_before_all_have_joined_a_rank_is_what_its_task_tells() -> None:
    roster = Roster(3, processes_per_task=2)
    member = roster.join(2, join("a", 2))
    assert member
    assert roster.rank(member, 1) == 5
    assert not roster.is_complete
    assert roster.missing_tasks() == [0, 1]


def test_a_second_agent_of_a_task_is_no_member_and_the_first_one_is_gone() -> None:
    roster = roster_of(join("a"))
    assert roster.join(0, join("b")) is None
    (gone,) = roster.gone()
    assert (gone.name, gone.why_left) == ("a", "another agent joined in its place")


def test_the_first_reason_of_a_departure_counts() -> None:
    member = Member(0, "a", "a", "a", "3.11.7", [], 1)
    member.leave("preempted", "preempted")
    member.leave("silent")
    assert (member.why_left, member.restart_cause) == ("preempted", "preempted")


@pytest.mark.parametrize(
    ("versions", "submitted_with", "words"),
    [
        (["2.13.0+cpu", "2.13.0+cu126"], "2.13.0", None),
        (["2.13.0", "2.13.0"], None, None),
        (["2.13.0", "2.4.0"], "2.13.0", "2.13.0 on a; 2.4.0 on b"),
        (["2.4.0", "2.4.0"], "2.13.0+cpu", "ranks have torch 2.4.0 and the job was submitted with 2.13.0"),
    ],
)
def test_versions_of_torch_that_differ_are_named(
    versions: list[str], submitted_with: str | None, words: str | None
) -> None:
    roster = roster_of(join("a"), join("b"))
    assert roster.number()
    for task, version in enumerate(versions):
        roster.note_ready(task, 0, version)
    found = roster.unlike_torch(submitted_with)
    assert found is None if words is None else words in str(found)


def test_which_ranks_are_not_ready() -> None:
    roster = roster_of(join("a", 2), join("b", 2))
    assert roster.number()
    for task, local_rank in [(0, 1), (1, 0), (1, 0)]:
        roster.note_ready(task, local_rank)
    assert roster.num_ready == 2
    assert roster.ranks_not_ready() == [0, 3]


@pytest.mark.parametrize(
    ("messages", "hosts"),
    [
        ([join("127.0.0.1", hostname="a")], ["127.0.0.1"]),
        ([join("127.0.0.1", hostname="a"), join("127.0.0.1", hostname="a")], ["127.0.0.1"]),
        ([join("127.0.0.1", hostname="a", address="10.0.0.1"), join("b")], ["10.0.0.1"]),
        ([join("localhost", hostname="a"), join("b")], ["localhost"]),
        ([join("a", address="10.0.0.1"), join("b")], ["a", "10.0.0.1"]),
    ],
)
def test_where_others_reach_a_member(messages: list[dict[str, Any]], hosts: list[str]) -> None:
    roster = roster_of(*messages)
    member = roster.get(0)
    assert member
    assert roster.rendezvous_hosts(member) == hosts


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
