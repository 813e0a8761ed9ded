"""How long a run waits for the next try, and when there is none."""

import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.airflow import versions

from rankzero import Launcher, RunCancelledError
from rankzero.kinds import RUN_ID
from rankzero.pipeline import LineWritten


def make(try_number: int, max_tries: int, **task: Any) -> tuple[Any, Any]:
    defaults = {"retry_delay": timedelta(minutes=5), "retry_exponential_backoff": 0, "max_retry_delay": None}
    return SimpleNamespace(**{**defaults, **task}), SimpleNamespace(try_number=try_number, max_tries=max_tries)


@pytest.mark.parametrize(
    ("task", "ti", "deferred", "seconds"),
    [
        # No try is left: as long as a drained task may take to come back, or a triggerer.
        (*make(1, 0), False, 900),
        (*make(3, 2), False, 900),
        (*make(1, 0), True, 1800),
        # A supervisor's death is noticed after 300 s, the retry is due after its delay, and gets a slot some time.
        (*make(1, 1), False, 300 + 300 + 900),
        (*make(1, 1, retry_delay=timedelta(hours=1)), True, 300 + 3600 + 900),
        # Delays that grow: the longest, with Airflow's own addition by chance, up to its bound.
        (*make(1, 3, retry_exponential_backoff=2.0), False, 300 + 2 * 300 * 4 + 900),
        (*make(1, 3, retry_exponential_backoff=True), False, 300 + 2 * 300 * 4 + 900),
        (*make(1, 9, retry_exponential_backoff=2.0, max_retry_delay=timedelta(hours=2)), False, 300 + 7200 + 900),
        (*make(1, 9, retry_exponential_backoff=2.0, max_retry_delay=1200.0), False, 300 + 1200 + 900),
        (*make(1, 9999, retry_exponential_backoff=5.0), False, 300 + 24 * 3600 + 900),
    ],
)
def test_a_lease_is_as_long_as_the_next_try_may_take(task: Any, ti: Any, deferred: bool, seconds: float) -> None:
    from airflow_rankzero import tries

    assert tries.lease(task, ti, deferred=deferred) == seconds


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        # An automatic retry.
        ((1, 3, 3), (2, 3, 3), True),
        ((3, 3, 3), (4, 3, 3), True),
        ((3, 5, 3), (4, 5, 3), True),
        # `retries` was raised meanwhile.
        ((1, 3, 3), (2, 3, 5), True),
        # A clear.
        ((1, 3, 3), (2, 4, 3), False),
        ((1, 0, 0), (2, 1, 0), False),
        # A clear after `retries` was lowered.
        ((1, 1, 1), (2, 1, 0), False),
        ((2, 2, 2), (3, 2, 0), False),
        # A clear of a task whose worker had died: Airflow starts another try beyond the most.
        ((1, 0, 0), (2, 0, 0), False),
        ((4, 3, 3), (5, 3, 3), False),
    ],
)
def test_a_clear_begins_another_chain_of_automatic_tries(
    first: tuple[int, int, int], second: tuple[int, int, int], is_same: bool
) -> None:
    from airflow_rankzero.tries import TaskTry

    tries = [
        SimpleNamespace(run_id="r", try_number=number, max_tries=most, task=SimpleNamespace(retries=retries))
        for number, most, retries in (first, second)
    ]
    names = [TaskTry(each).generation for each in tries]
    assert (names[0] == names[1]) is is_same


def test_a_retry_policy_may_make_the_next_try_wait_longer() -> None:
    versions.needs(3, 3, "retry policies")
    from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

    from airflow_rankzero import tries

    rules = [
        RetryRule(exception="rankzero.errors.HangError", action=RetryAction.FAIL),
        RetryRule(exception=OSError, action=RetryAction.RETRY, retry_delay=timedelta(hours=2)),
    ]
    task, ti = make(1, 1, retry_policy=ExceptionRetryPolicy(rules))
    assert tries.lease(task, ti, deferred=False) == 300 + 7200 + 900


def wait_long() -> None:
    import time

    time.sleep(120)


@pytest.mark.parametrize(
    ("state", "notified"),
    [("failed", True), ("success", False), ("skipped", False), ("restarting", False), (None, False)],
)
def test_a_user_s_mark_notifies_of_a_failure_only_if_it_is_one(
    tmp_path: Path, state: str | None, notified: bool
) -> None:
    from airflow.sdk import BaseOperator

    from airflow_rankzero.tries import TaskLog, TaskTry

    task = BaseOperator(task_id="train", email="me", on_retry_callback=print, on_failure_callback=print)
    ti = SimpleNamespace(
        dag_id="d", task_id="train", run_id="r", map_index=-1, id="1", try_number=1, max_tries=3, task=task
    )
    ti.get_task_states = lambda **_: {"r": {"train": state}}
    handle = Launcher(1, store=tmp_path).submit(wait_long)
    operator = SimpleNamespace(is_killed=True, log_ranks=None, stop_grace=0.1, log=logging.getLogger("task"))
    log = TaskLog(handle, TaskTry(ti), operator)
    expected = versions.exception("AirflowFailException") if notified else RunCancelledError
    what = f"set the task to {state}" if state else "no state of the task, as after a clear"
    with pytest.raises(expected, match=what):
        log.follow()
    assert handle.status().state == "cancelled"
    assert f"on request: Airflow has {what}" in str(handle.status().error)
    assert bool(task.on_failure_callback) is bool(task.email) is notified
    # With tries left, Airflow calls this for every other exception than AirflowFailException.
    assert notified or not task.on_retry_callback


@pytest.mark.parametrize(
    ("error", "try_number", "reason"),
    [
        ("Trigger timeout", 1, "TaskDeferralTimeout"),
        ("Trigger failure", 2, "TaskDeferralError"),
        # The next try attaches to the run.
        ("Trigger failure", 1, None),
    ],
)
def test_a_deferral_that_failed_for_good_ends_the_run(
    tmp_path: Path, error: str, try_number: int, reason: str | None
) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR

    from airflow_rankzero import TorchDistributorOperator

    handle = Launcher(1, store=tmp_path).submit(wait_long)
    operator = TorchDistributorOperator(task_id="train", train=wait_long, num_processes=1, stop_grace=0.1)
    _, ti = make(try_number, 1)
    ti.map_index, ti.xcom_pull = None, lambda **_: handle.directory
    try:
        with pytest.raises((versions.exception("TaskDeferralError"), versions.exception("TaskDeferralTimeout"))):
            operator.resume_execution(TRIGGER_FAIL_REPR, {"error": error}, {"ti": ti})
        if reason is None:
            assert handle.own.cancel_request() is None
        else:
            assert handle.wait(60)
            assert f"on request: the deferral of the Airflow task failed: {reason}" in str(handle.status().error)
    finally:
        handle.cancel()
        handle.wait(60)


@pytest.mark.parametrize("word", ["::group::", "::endgroup::"])
def test_a_line_of_a_rank_opens_and_ends_no_group(caplog: pytest.LogCaptureFixture, word: str) -> None:
    from airflow_rankzero import tries

    caplog.set_level(logging.INFO)
    tries.show_line(logging.getLogger("task"), LineWritten(f"[0] {word} of a rank"))
    assert word not in caplog.text
    assert caplog.records[0].getMessage().replace("\u200b", "") == f"[0] {word} of a rank"


def test_names_are_readable_and_tell_each_task_instance() -> None:
    from airflow_rankzero.tries import run_id_of

    first = run_id_of("d", "manual__2026-01-01T00:00:00+00:00", "group.t", 4)
    assert first.startswith("d__manual__2026-01-01T00-00-00+00-00__group.t__4-")
    names = [("d", "r:1", "t", -1), ("d", "r-1", "t", -1), ("d__r", "1", "t", -1), ("d", "r__1", "t", -1)]
    names += [("d" * 250, "r" * 250, "t" * 250, index) for index in range(3)] + [
        ("_d", "r", "t", 0),
        ("日本", "r", "t", -1),
    ]
    run_ids = {run_id_of(*name) for name in names}
    assert len(run_ids) == len(names)
    for run_id in run_ids:
        RUN_ID.check("run_id", run_id)
