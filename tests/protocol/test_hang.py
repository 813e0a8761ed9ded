"""When a run counts as hung, and what is known of it then."""

from rankzero.bounds import MEET_TIMEOUT
from rankzero.channel.messages import Stack
from rankzero.driver import policy
from rankzero.driver.hangs import HangWatch

BOUND = 10.0
NOT_OVER = frozenset[int]()


def watched() -> HangWatch:
    """Two ranks that sent a heartbeat at time 0."""
    watch = HangWatch(2)
    watch.begin(0.0)
    for rank in range(2):
        watch.on_beat(rank, 1, 0.0)
    return watch


def test_a_rank_without_heartbeats_hangs_from_the_start_on() -> None:
    watch = HangWatch(2)
    watch.begin(5.0)
    watch.on_beat(0, 1, 6.0)
    # Until then it may be looking for rank 0.
    start = 5.0 + MEET_TIMEOUT()
    assert not watch.find(start + BOUND, BOUND, NOT_OVER)
    assert watch.find(start + 0.1 + BOUND, BOUND, NOT_OVER)


def test_a_rank_that_does_not_reply_has_a_text_in_place_of_its_stack() -> None:
    watch = watched()
    watch.stacks[1] = Stack("there")
    assert watch.texts == {0: policy.NO_REPLY, 1: "there"}


def test_progress_of_one_rank_is_progress_and_a_beat_without_it_is_none() -> None:
    watch = watched()
    assert not watch.find(BOUND, BOUND, NOT_OVER)
    assert watch.find(BOUND + 1, BOUND, NOT_OVER)
    watch.on_beat(0, 1, BOUND + 1)
    assert watch.find(BOUND + 1, BOUND, NOT_OVER)
    watch.on_beat(1, 2, BOUND + 1)
    assert not watch.find(BOUND + 2, BOUND, NOT_OVER)
    assert watch.find(2 * BOUND + 2, BOUND, NOT_OVER)


def test_no_run_hangs_while_a_value_is_stored() -> None:
    watch = watched()
    for rank in range(2):
        watch.on_return(rank, BOUND)
    for second in range(100):
        for rank in range(2):
            watch.on_beat(rank, 1, BOUND + second)
        assert not watch.find(BOUND + second, BOUND, NOT_OVER)


def test_a_returned_rank_without_heartbeats_hangs_unless_it_has_sent_its_last_report() -> None:
    watch = watched()
    for rank in range(2):
        watch.on_return(rank, BOUND)
    watch.on_beat(1, 1, 3 * BOUND)
    assert not watch.find(3 * BOUND, BOUND, frozenset({0}))
    why = f"rank 0 returned, and then sent no heartbeat for hang_timeout={BOUND} s"
    assert watch.find(3 * BOUND, BOUND, NOT_OVER) == (why, [0])


def test_a_return_is_progress_and_what_comes_after_it_hides_no_peer_that_hangs() -> None:
    watch = watched()
    watch.on_return(0, BOUND)
    assert not watch.find(2 * BOUND, BOUND, NOT_OVER)
    watch.on_beat(0, 2, 2 * BOUND)
    assert watch.find(2 * BOUND + 1, BOUND, NOT_OVER)
