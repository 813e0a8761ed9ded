"""When a run counts as hung, and what is known of it then."""

from rankzero import bounds
from rankzero.bounds import MEET_TIMEOUT
from rankzero.driver.hangs import HangWatch

BOUND = 10.0


class Watched:
    """Two ranks that were heard of at time 0, and how often they were asked for their stacks."""

    def __init__(self) -> None:
        self.asked = 0
        self.disconnected: list[str] = []
        self.watch = HangWatch(2, self.ask, lambda: self.disconnected)
        for rank in range(2):
            self.watch.on_beat(rank, 1, 0.0)

    def ask(self, message: object) -> None:
        self.asked += 1

    def poll(self, now: float) -> dict[int, str] | None:
        return self.watch.poll(now, BOUND)


def test_a_rank_that_was_never_heard_of_hangs_from_the_start_on() -> None:
    asked: list[int] = []
    watch = HangWatch(2, lambda _: asked.append(1), list)
    assert watch.poll(5.0, BOUND) is None
    watch.on_beat(0, 1, 6.0)
    # Until then it may be looking for rank 0.
    start = 5.0 + MEET_TIMEOUT()
    assert watch.poll(start + BOUND, BOUND) is None
    assert not asked
    assert watch.poll(start + 0.1 + BOUND, BOUND) is None
    assert asked
    stacks = watch.poll(start + 0.2 + BOUND + bounds.STACKS_WINDOW(), BOUND)
    assert stacks is not None
    assert list(stacks) == [0, 1]


def test_stacks_are_asked_for_once_and_told_when_all_are_there() -> None:
    ranks = Watched()
    assert ranks.poll(BOUND) is None
    assert ranks.asked == 0
    assert ranks.poll(BOUND + 1) is None
    ranks.watch.on_stack(0, "here")
    assert ranks.poll(BOUND + 2) is None
    ranks.watch.on_stack(1, "there")
    assert ranks.poll(BOUND + 3) == {0: "here", 1: "there"}
    assert ranks.asked == 1


def test_a_rank_that_does_not_answer_is_not_waited_for_longer() -> None:
    ranks = Watched()
    assert ranks.poll(BOUND + 1) is None
    ranks.watch.on_stack(1, "there")
    stacks = ranks.poll(BOUND + 1.1 + bounds.STACKS_WINDOW())
    assert stacks == {0: "no answer: its agent or the network hangs", 1: "there"}


def test_no_run_hangs_while_heartbeats_are_delayed_by_a_broken_connection() -> None:
    """The run counts as hung just before the connection breaks, and its agent has 15 s to make a new one."""
    ranks = Watched()
    assert ranks.poll(BOUND + 1) is None
    ranks.disconnected = ["agent"]
    assert ranks.poll(BOUND + 2) is None
    back = BOUND + 1.1 + bounds.STACKS_WINDOW()
    assert ranks.poll(back) is None
    # Its heartbeats arrive after it is connected again.
    ranks.disconnected = []
    assert ranks.poll(back + 0.1) is None
    ranks.watch.on_beat(0, 2, back + 0.2)
    assert ranks.poll(back + 0.2) is None
    # Ranks that then make no progress hang.
    hung = back + 0.3 + BOUND
    assert ranks.poll(hung) is None
    assert ranks.poll(hung + 0.1 + bounds.STACKS_WINDOW())


def test_progress_of_one_rank_is_progress_and_a_beat_without_it_is_none() -> None:
    ranks = Watched()
    assert ranks.poll(BOUND + 1) is None
    ranks.watch.on_beat(0, 1, BOUND + 1)
    ranks.watch.on_beat(1, 2, BOUND + 1)
    assert ranks.poll(BOUND + 2) is None
    # It hangs again: the ranks are asked anew.
    assert ranks.poll(2 * BOUND + 2) is None
    assert ranks.asked == 2


def test_nobody_hangs_while_a_value_is_stored() -> None:
    ranks = Watched()
    for rank in range(2):
        ranks.watch.on_return(rank, BOUND)
    for second in range(100):
        for rank in range(2):
            ranks.watch.on_beat(rank, 1, BOUND + second)
        assert ranks.poll(BOUND + second) is None
    assert ranks.asked == 0


def test_a_returned_rank_without_heartbeats_hangs_unless_it_has_sent_its_last_report() -> None:
    ranks = Watched()
    for rank in range(2):
        ranks.watch.on_return(rank, BOUND)
    ranks.watch.on_beat(1, 1, 3 * BOUND)
    assert ranks.watch.poll(3 * BOUND, BOUND, over={0}) is None
    assert ranks.watch.poll(3 * BOUND, BOUND) is None
    assert ranks.asked == 1
    assert ranks.watch.poll(3.1 * BOUND + bounds.STACKS_WINDOW(), 2 * BOUND) is not None
    assert ranks.watch.silent == [0]


def test_a_return_is_progress_and_what_comes_after_it_hides_no_peer_that_hangs() -> None:
    ranks = Watched()
    ranks.watch.on_return(0, BOUND)
    assert ranks.poll(2 * BOUND) is None
    ranks.watch.on_beat(0, 2, 2 * BOUND)
    assert ranks.asked == 0
    assert ranks.poll(2 * BOUND + 1) is None
    assert ranks.asked == 1
    assert ranks.poll(2 * BOUND + 1.1 + bounds.STACKS_WINDOW()) is not None
