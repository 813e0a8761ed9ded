"""How long a run waits for the next try, and when there is none."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest


def make(try_number: int, max_tries: int, **task: Any) -> tuple[Any, Any]:
    defaults = {"retry_delay": timedelta(minutes=5), "retry_exponential_backoff": 0, "max_retry_delay": None}
    return SimpleNamespace(**{**defaults, **task}), SimpleNamespace(try_number=try_number, max_tries=max_tries)


@pytest.mark.parametrize(
    ("task", "ti", "deferred", "seconds"),
    [
        # No try is left: a minute, or as long as a triggerer may take to come back.
        (*make(1, 0), False, 60),
        (*make(3, 2), False, 60),
        (*make(1, 0), True, 1800),
        # A supervisor's death is noticed after 300 s, the retry is due after its delay, and gets a slot some time.
        (*make(1, 1), False, 300 + 300 + 900),
        (*make(1, 1, retry_delay=timedelta(hours=1)), True, 300 + 3600 + 900),
        # Delays that grow: the longest, with Airflow's own addition by chance, up to its bound.
        (*make(1, 3, retry_exponential_backoff=2.0), False, 300 + 2 * 300 * 4 + 900),
        (*make(1, 9, retry_exponential_backoff=2.0, max_retry_delay=timedelta(hours=2)), False, 300 + 7200 + 900),
        (*make(1, 9, retry_exponential_backoff=2.0, max_retry_delay=1200.0), False, 300 + 1200 + 900),
        (*make(1, 9999, retry_exponential_backoff=5.0), False, 300 + 24 * 3600 + 900),
    ],
)
def test_a_lease_is_as_long_as_the_next_try_may_take(task: Any, ti: Any, deferred: bool, seconds: float) -> None:
    from airflow_rankzero import tries

    assert tries.lease(task, ti, deferred=deferred) == seconds


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ({"r": {"train": "running"}}, True),
        ({"r": {"train_3": "running"}}, True),
        ({"r": {"train": "failed"}}, False),
        ({"r": {"train": "success"}}, False),
        ({"r": {"train": "restarting"}}, False),
        ({"r": {"train": None}}, False),
        ({}, False),
        (OSError("the API server is gone, too"), True),
    ],
)
def test_a_try_is_wanted_while_airflow_counts_it_as_running(answer: Any, wanted: bool) -> None:
    from airflow_rankzero import tries

    asked: list[dict[str, Any]] = []

    def get_task_states(**kwargs: Any) -> Any:
        asked.append(kwargs)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ti = SimpleNamespace(dag_id="d", task_id="train", run_id="r", map_index=3, get_task_states=get_task_states)
    assert tries.is_still_wanted(ti) is wanted
    assert asked == [{"dag_id": "d", "task_ids": ["train"], "run_ids": ["r"], "map_index": 3}]
