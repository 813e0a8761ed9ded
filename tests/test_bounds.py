"""Time limits of different processes hold in relation to each other, so a change of one must look at the other."""

from rankzero import bounds


def test_a_driver_is_dead_only_after_several_heartbeats() -> None:
    assert 3 * bounds.HEARTBEAT_INTERVAL < bounds.DRIVER_DEAD_AFTER < bounds.DRIVER_STALE_AFTER


def test_ranks_in_a_collective_without_the_others_are_named_before_they_count_as_hung() -> None:
    assert bounds.RETURNED_NOTICE < bounds.RETURNED_HANG


def test_a_temporary_file_of_a_store_that_is_out_for_a_while_does_not_count_as_left() -> None:
    assert bounds.STORE_OUTAGE < bounds.UNFINISHED_AFTER
