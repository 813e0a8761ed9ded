"""When a run counts as hung: without progress, or when ranks that remain wait for others that have returned."""

import pytest

from rankzero.bounds import MEET_TIMEOUT
from rankzero.channel.messages import Stack
from rankzero.driver.ending import NO_REPLY, Facts
from rankzero.driver.watch import RETURNED_HANG, RETURNED_NOTICE, HangWatch, describe, is_waiting

SITE = "/venv/lib/python3.12/site-packages/torch"
USER = '  File "/home/me/train.py", line 12 in train'
ALL_REDUCE = f"""
  File "{SITE}/distributed/distributed_c10d.py", line 2900 in all_reduce
  File "{SITE}/distributed/c10d_logger.py", line 81 in wrapper
{USER}"""
BACKWARD = f'  File "{SITE}/autograd/graph.py", line 824 in _engine_run_backward\n{USER}'
SAVE = f'  File "{SITE}/distributed/checkpoint/filesystem.py", line 9 in write\n{USER}'
EVALUATE = f'  File "{SITE}/nn/modules/linear.py", line 125 in forward\n{USER}'
HVD = f"""
  File "/x/rankzero/compat/horovod/torch/operations.py", line 9 in wait
{USER}"""
DOOR = f"""
{USER}
  File "/x/rankzero/compat/horovod/runner.py", line 9 in call"""
NATIVE = ""


@pytest.mark.parametrize(
    ("stack", "waits", "words"),
    [
        (ALL_REDUCE, True, "waits in a collective, train.py:12 in train"),
        (BACKWARD, True, "waits in a collective, train.py:12 in train"),
        (HVD, True, "waits in a collective, train.py:12 in train"),
        (DOOR, False, "works, train.py:12 in train"),
        (SAVE, False, "works, train.py:12 in train"),
        (EVALUATE, False, "works, train.py:12 in train"),
        (USER, False, "works, train.py:12 in train"),
        (NATIVE, False, "works"),
    ],
)
def test_only_a_rank_within_a_collective_waits(stack: str, waits: bool, words: str) -> None:
    assert is_waiting(stack) is waits
    assert describe(stack) == words


def watch(
    stacks: list[str], cpu_per_second: float | None = 0.0, progress_every: float = 1e9
) -> tuple[list[str], float]:
    """Rank 1 of two returns at 0; the lines that are told, and when the run counts as hung (0: never)."""
    hangs, told, now, progress = HangWatch(Facts(2, "")), [], 0.0, 0
    hangs.begin(-1e6)
    hangs.on_beat(0, 0, 0.0)
    hangs.on_return(1, 0.0)
    while now < 2 * RETURNED_HANG():
        if now // progress_every > progress:
            progress += 1
            hangs.on_beat(0, progress, now)
        if hangs.must_look(now):
            cpu = None if cpu_per_second is None else now * cpu_per_second
            hangs.stacks[0] = Stack(stacks[int(now // RETURNED_NOTICE()) % len(stacks)], cpu)
            told += filter(None, [hangs.look(now)])
        if hangs.find(now, None):
            return told, now
        now += 0.5
    return told, 0.0


def test_a_rank_that_waits_for_one_that_has_returned_is_told_of_and_then_hangs() -> None:
    told, hung_at = watch([ALL_REDUCE])
    assert told == [
        "rank 1 returned, without other progress for 30 s: rank 0 waits in a collective, train.py:12 in train"
    ]
    assert RETURNED_HANG() <= hung_at < RETURNED_HANG() + RETURNED_NOTICE()


@pytest.mark.parametrize(
    ("stacks", "cpu"),
    [
        # Computes alone; is seen in a collective now and then; is always there, and works.
        ([EVALUATE], 1.0),
        ([SAVE], 0.0),
        ([ALL_REDUCE, EVALUATE], 0.0),
        ([ALL_REDUCE, ALL_REDUCE.replace("2900", "2901")], None),
        ([ALL_REDUCE], 0.5),
    ],
)
def test_a_rank_that_works_alone_never_hangs_and_is_told_of_once(stacks: list[str], cpu: float | None) -> None:
    told, hung_at = watch(stacks, cpu)
    assert len(told) == 1
    assert hung_at == 0


@pytest.mark.parametrize("meanwhile", ["returns", "moves on"])
def test_a_rank_that_returns_or_moves_on_while_its_stack_is_requested_does_not_hang(meanwhile: str) -> None:
    hangs = HangWatch(Facts(2, ""))
    hangs.begin(-1e6)
    hangs.on_beat(0, 0, 0.0)
    hangs.on_return(1, 0.0)
    hangs.stacks[0] = Stack(ALL_REDUCE, 0.0)
    hangs.look(RETURNED_NOTICE())
    now = RETURNED_HANG()
    assert hangs.find(now, None)
    hangs.on_return(0, now) if meanwhile == "returns" else hangs.on_beat(0, 1, now)
    hangs.look(now + 1.0)
    assert not hangs.find(now + 1.0, None)


def test_nothing_is_told_while_there_is_progress_or_before_or_after_the_return() -> None:
    assert watch([ALL_REDUCE], progress_every=RETURNED_NOTICE() - 1) == ([], 0.0)
    hangs = HangWatch(Facts(2, ""))
    hangs.begin(0.0)
    assert not hangs.must_look(1e6)
    for rank in range(2):
        hangs.on_return(rank, 0.0)
    assert not hangs.must_look(1e6)


# -- without progress ----------------------------------------------------------------------------

BOUND = 10.0


def watched() -> HangWatch:
    """Two ranks that sent a heartbeat at time 0."""
    watch = HangWatch(Facts(2, ""))
    watch.begin(0.0)
    for rank in range(2):
        watch.on_beat(rank, 1, 0.0)
    return watch


def test_a_rank_without_heartbeats_hangs_from_the_start_on() -> None:
    watch = HangWatch(Facts(2, ""))
    watch.begin(5.0)
    watch.on_beat(0, 1, 6.0)
    # Until then it may be looking for rank 0.
    start = 5.0 + MEET_TIMEOUT()
    assert not watch.find(start + BOUND, BOUND)
    assert watch.find(start + 0.1 + BOUND, BOUND)


def test_a_rank_that_does_not_reply_has_a_text_in_place_of_its_stack() -> None:
    watch = watched()
    watch.stacks[1] = Stack("there")
    assert watch.texts == {0: NO_REPLY, 1: "there"}


def test_progress_of_one_rank_is_progress_and_a_beat_without_it_is_none() -> None:
    watch = watched()
    assert not watch.find(BOUND, BOUND)
    assert watch.find(BOUND + 1, BOUND)
    watch.on_beat(0, 1, BOUND + 1)
    assert watch.find(BOUND + 1, BOUND)
    watch.on_beat(1, 2, BOUND + 1)
    assert not watch.find(BOUND + 2, BOUND)
    assert watch.find(2 * BOUND + 2, BOUND)


def test_no_run_hangs_while_a_value_is_stored() -> None:
    watch = watched()
    for rank in range(2):
        watch.on_return(rank, BOUND)
    for second in range(100):
        for rank in range(2):
            watch.on_beat(rank, 1, BOUND + second)
        assert not watch.find(BOUND + second, BOUND)


def test_a_returned_rank_without_heartbeats_hangs_unless_it_has_sent_its_last_report() -> None:
    watch = HangWatch(facts := Facts(2, ""))
    for rank in range(2):
        watch.on_return(rank, BOUND)
    watch.on_beat(1, 1, 3 * BOUND)
    why = f"rank 0 returned, and then sent no heartbeat for hang_timeout={BOUND} s"
    assert watch.find(3 * BOUND, BOUND) == (why, [0])
    facts.over.add(0)
    assert not watch.find(3 * BOUND, BOUND)


def test_a_return_is_progress_and_what_comes_after_it_hides_no_peer_that_hangs() -> None:
    watch = watched()
    watch.on_return(0, BOUND)
    assert not watch.find(2 * BOUND, BOUND)
    watch.on_beat(0, 2, 2 * BOUND)
    assert watch.find(2 * BOUND + 1, BOUND)
