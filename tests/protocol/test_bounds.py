"""Time limits of different processes hold in relation to each other, so a change of one must look at the other."""

import pytest

from rankzero import InvalidJobError, Launcher, bounds
from rankzero.agent import supervise
from rankzero.channel import connection, server
from rankzero.driver import attempt, places, storage, watch
from rankzero.run import directory, tries
from rankzero.store import upkeep
from rankzero.submit import durable


@pytest.fixture(autouse=True, params=["0.02", "1", "4"])
def factor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The relations hold whatever `RANKZERO_TIME_SCALE` is."""
    monkeypatch.setenv(bounds.TIME_SCALE, request.param)
    return float(request.param)


def test_a_factor_stretches_every_limit_and_shrinks_only_those_by_which_no_process_is_judged(factor: float) -> None:
    assert bounds.scaled(10.0)() == 10.0 * factor
    assert bounds.stretched(10.0)() == 10.0 * max(1.0, factor)
    assert bounds.stretched(10.0, least=3.0)() == 10.0 * max(0.3, factor)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan"])
@pytest.mark.parametrize("of_ranks", [True, False])
def test_a_factor_that_is_no_positive_number_is_refused_before_anything_starts(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, text: str, of_ranks: bool
) -> None:
    monkeypatch.setenv(bounds.TIME_SCALE, "1" if of_ranks else text)
    launcher = launcher.options(env={bounds.TIME_SCALE: text} if of_ranks else None)
    with pytest.raises(InvalidJobError, match=f"RANKZERO_TIME_SCALE='{text}' is no positive number"):
        launcher.run(len, "ab")


def test_an_end_of_a_connection_is_lost_only_after_many_pings_and_a_cut_that_heals() -> None:
    # TCP sends again 12.6, 25.4 and 51 s after the begin of a cut, and Linux 6.15 every two seconds.
    assert bounds.CONNECTION_LOST_AFTER() >= 40 * connection.PING_INTERVAL * min(1.0, max(0.3, bounds.scale()))


def test_a_driver_is_dead_only_after_several_heartbeats() -> None:
    assert bounds.DRIVER_DEAD_AFTER() > 3 * bounds.HEARTBEAT_INTERVAL


def test_a_driver_is_replaced_only_after_its_agents_have_given_it_up() -> None:
    assert bounds.CONNECTION_LOST_AFTER() + bounds.STOP_GRACE + bounds.STOP_MARGIN() < bounds.DRIVER_DEAD_AFTER()


def test_ranks_in_a_collective_without_the_others_are_named_before_they_count_as_hung() -> None:
    assert watch.RETURNED_NOTICE() < watch.RETURNED_HANG()


def test_a_temporary_file_of_a_store_that_is_out_for_a_while_does_not_count_as_left() -> None:
    assert bounds.STORE_OUTAGE() < upkeep.UNFINISHED_AFTER()


def test_the_driver_waits_longer_for_an_agent_than_the_agent_delivers_its_last_lines() -> None:
    assert supervise.STOPPED_LINES_TIMEOUT() < bounds.STOP_MARGIN()
    assert supervise.WORKER_EXIT_MARGIN() < attempt.SUCCESS_END_TIMEOUT()


def test_who_cancels_a_run_waits_longer_than_its_driver_takes_to_record_its_end() -> None:
    # Agents exit; the engine cancels them, and reports their end; the last checkpoint is stored.
    stops = 4 * bounds.STOP_MARGIN()
    # Connections are read to their end in both the cancel and the close of an attempt.
    closes = 2 * server.LAST_READ_TIMEOUT() + places.SESSION_CLOSE_TIMEOUT()
    # A store is asked who wants the end: by the last read that had begun, and by another one.
    asks = watch.REASON_TIMEOUT()
    assert stops + closes + asks < bounds.CANCEL_TIMEOUT()
    assert durable.OWNER_LEASE() < bounds.CANCEL_TIMEOUT()


def test_a_rank_waits_for_its_checkpoints_as_long_as_the_driver_tries_to_store_them() -> None:
    assert storage.CHECKPOINT_RETRY_TIMEOUT() < bounds.CHECKPOINT_COMMIT_TIMEOUT() < upkeep.UNFINISHED_AFTER()


def test_a_lease_outlasts_the_renewals_that_its_follower_may_miss() -> None:
    assert directory.RENEWAL_INTERVAL < directory.RENEWAL_INTERVAL_REMOTE
    assert watch.MISSED_RENEWALS * directory.RENEWAL_INTERVAL_REMOTE < tries.SCHEDULING_SLACK <= tries.DETACHED_LEASE
