"""Time limits of different processes hold in relation to each other, so a change of one must look at the other."""

import pytest

from rankzero import InvalidJobError, Launcher, bounds
from rankzero.driver import hangs, watch
from rankzero.run import lease


@pytest.fixture(autouse=True, params=["0.02", "1", "4"])
def factor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The relations hold whatever `RANKZERO_TIME_SCALE` is."""
    monkeypatch.setenv(bounds.TIME_SCALE, request.param)
    return float(request.param)


def test_a_factor_stretches_every_limit_and_shrinks_only_those_by_which_no_process_is_judged(factor: float) -> None:
    assert bounds.scaled(10.0)() == 10.0 * factor
    assert bounds.stretched(10.0)() == 10.0 * max(1.0, factor)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan"])
@pytest.mark.parametrize("of_ranks", [True, False])
def test_a_factor_that_is_no_positive_number_is_refused_before_anything_starts(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, text: str, of_ranks: bool
) -> None:
    monkeypatch.setenv(bounds.TIME_SCALE, "1" if of_ranks else text)
    launcher = launcher.options(env={bounds.TIME_SCALE: text} if of_ranks else None)
    with pytest.raises(InvalidJobError, match=f"RANKZERO_TIME_SCALE='{text}' is no positive number"):
        launcher.run(len, "ab")


def test_a_connection_is_silent_only_after_several_pings_and_is_made_again_before_the_other_end_is_lost() -> None:
    assert bounds.CONNECTION_SILENCE() >= 3 * bounds.PING_INTERVAL
    again = bounds.CONNECT_PAUSE_MAX + bounds.CONNECT_TRY_TIMEOUT() + bounds.HANDSHAKE_REPLY_TIMEOUT()
    assert bounds.CONNECTION_SILENCE() + again < bounds.CONNECTION_LOST_AFTER()


def test_an_agent_can_try_to_connect_again_and_the_driver_keeps_a_connection_for_as_long_as_the_agent_waits() -> None:
    two_tries = 2 * (bounds.CONNECT_TRY_TIMEOUT() + bounds.HANDSHAKE_REPLY_TIMEOUT()) + bounds.CONNECT_PAUSE_MAX
    assert two_tries < bounds.AGENT_CONNECT_TIMEOUT()
    assert bounds.HANDSHAKE_REPLY_TIMEOUT() < bounds.HANDSHAKE_TIMEOUT()


def test_a_driver_is_dead_only_after_several_heartbeats() -> None:
    assert bounds.DRIVER_DEAD_AFTER() > 3 * bounds.HEARTBEAT_INTERVAL


def test_ranks_in_a_collective_without_the_others_are_named_before_they_count_as_hung() -> None:
    assert hangs.RETURNED_NOTICE() < hangs.RETURNED_HANG()


def test_a_temporary_file_of_a_store_that_is_out_for_a_while_does_not_count_as_left() -> None:
    assert bounds.STORE_OUTAGE() < bounds.UNFINISHED_AFTER()


def test_the_driver_waits_longer_for_an_agent_than_the_agent_delivers_its_last_lines() -> None:
    assert bounds.STOPPED_LINES_TIMEOUT() < bounds.STOP_MARGIN()
    assert bounds.WORKER_EXIT_MARGIN() + bounds.LAST_LINES_STALL_TIMEOUT() < bounds.SUCCESS_END_TIMEOUT()
    assert bounds.LAST_LINES_STALL_TIMEOUT() < bounds.LAST_LINES_TIMEOUT()


def test_the_driver_waits_longer_for_stacks_than_the_agent_gives_its_workers_to_write_them() -> None:
    assert bounds.STACKS_TIMEOUT() < bounds.STACKS_WINDOW()


def test_the_driver_waits_for_a_cause_until_a_silent_agent_is_disconnected() -> None:
    assert bounds.CONNECTION_SILENCE() + bounds.PING_INTERVAL / 4 < bounds.CAUSE_WINDOW() + bounds.STACKS_WINDOW()
    # What the engine says of a loss counts only when what its agents sent has been read.
    assert bounds.LAST_READ_TIMEOUT() < bounds.CAUSE_WINDOW()


def test_who_cancels_a_run_waits_longer_than_its_driver_takes_to_record_its_end() -> None:
    # Agents exit; the engine cancels them, and reports their end; the last checkpoint is stored.
    stops = 4 * bounds.STOP_MARGIN()
    # A thread of the channel that is stuck is waited for in both the cancel and the close of an attempt.
    closes = 2 * bounds.CHANNEL_CLOSE_TIMEOUT() + bounds.SESSION_CLOSE_TIMEOUT()
    # A store is asked who wants the end: by the last read that had begun, and by another one.
    asks = 2 * bounds.CANCEL_REQUEST_TIMEOUT()
    assert stops + closes + asks < bounds.CANCEL_TIMEOUT()
    assert bounds.OWNER_LEASE() < bounds.CANCEL_TIMEOUT()


def test_a_rank_waits_for_its_checkpoints_as_long_as_the_driver_tries_to_store_them() -> None:
    assert bounds.CHECKPOINT_RETRY_TIMEOUT() < bounds.CHECKPOINT_COMMIT_TIMEOUT() < bounds.UNFINISHED_AFTER()


def test_a_lease_outlasts_the_renewals_that_its_follower_may_miss() -> None:
    assert lease.RENEWAL_INTERVAL < lease.RENEWAL_INTERVAL_REMOTE
    assert watch.MISSED_RENEWALS * lease.RENEWAL_INTERVAL_REMOTE < lease.SCHEDULING_SLACK <= lease.DETACHED_LEASE
