"""Time limits of different processes hold in relation to each other, so a change of one must look at the other."""

from rankzero import bounds


def test_a_connection_is_silent_only_after_several_pings_and_is_made_again_before_the_other_end_is_lost() -> None:
    assert 3 * bounds.PING_INTERVAL <= bounds.CONNECTION_SILENCE
    again = bounds.CONNECT_PAUSE_MAX + bounds.CONNECT_TRY_TIMEOUT + bounds.HANDSHAKE_REPLY_TIMEOUT
    assert bounds.CONNECTION_SILENCE + again < bounds.CONNECTION_LOST_AFTER


def test_an_agent_can_try_to_connect_again_and_the_driver_keeps_a_connection_for_as_long_as_the_agent_waits() -> None:
    assert (
        2 * (bounds.CONNECT_TRY_TIMEOUT + bounds.HANDSHAKE_REPLY_TIMEOUT) + bounds.CONNECT_PAUSE_MAX
        < bounds.AGENT_CONNECT_TIMEOUT
    )
    assert bounds.HANDSHAKE_REPLY_TIMEOUT < bounds.HANDSHAKE_TIMEOUT
    assert bounds.UNPROVED_GRACE < bounds.HANDSHAKE_TIMEOUT


def test_a_driver_is_dead_only_after_several_heartbeats() -> None:
    assert 3 * bounds.HEARTBEAT_INTERVAL < bounds.DRIVER_DEAD_AFTER < bounds.DRIVER_STALE_AFTER


def test_ranks_in_a_collective_without_the_others_are_named_before_they_count_as_hung() -> None:
    assert bounds.RETURNED_NOTICE < bounds.RETURNED_HANG


def test_a_temporary_file_of_a_store_that_is_out_for_a_while_does_not_count_as_left() -> None:
    assert bounds.STORE_OUTAGE < bounds.UNFINISHED_AFTER
