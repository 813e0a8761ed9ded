"""What a step answers about Dagster: will another try come, how long may that take. Without processes."""

import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._utils.interrupts import raise_interrupts_as

from dagster_rankzero._compat import DELEGATED, IN_PROCESS, MULTIPROCESS, signal_of
from dagster_rankzero.step import Step, lease, run_id_of

POLICY = dg.RetryPolicy


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (None, 900),
        (POLICY(max_retries=3), 900),
        (POLICY(max_retries=3, delay=600), 600 + 900),
        (POLICY(max_retries=3, delay=600, backoff=dg.Backoff.LINEAR), 3 * 600 + 900),
        (POLICY(max_retries=3, delay=600, backoff=dg.Backoff.EXPONENTIAL), 7 * 600 + 900),
        (POLICY(max_retries=3, delay=600, jitter=dg.Jitter.FULL), 600 + 900),
        (POLICY(max_retries=3, delay=600, jitter=dg.Jitter.PLUS_MINUS), 2 * 600 + 900),
        (POLICY(max_retries=99, delay=600, backoff=dg.Backoff.EXPONENTIAL), 24 * 3600 + 900),
        (POLICY(max_retries=9999, delay=600, backoff=dg.Backoff.EXPONENTIAL), 24 * 3600 + 900),
        (POLICY(max_retries=1, delay=48 * 3600), 48 * 3600 + 900),
    ],
)
def test_a_lease_is_as_long_as_the_next_try_may_take(policy: dg.RetryPolicy | None, seconds: float) -> None:
    assert lease(policy) == seconds


STEP = Step(
    dagster_run="one",
    root="one",
    generation="one",
    key="train",
    number=0,
    executor=MULTIPROCESS,
    is_retried=True,
    run_is_retried=False,
    lease=900.0,
    instance=SimpleNamespace(get_run_by_id=lambda _: SimpleNamespace(is_finished=False, status="STARTED")),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("facts", "comes"),
    [
        pytest.param({}, True, id="the run's process retries a step that died"),
        pytest.param({"is_retried": False}, False, id="no try is left"),
        pytest.param({"executor": IN_PROCESS}, False, id="with the step died the only process"),
        pytest.param({"executor": IN_PROCESS, "run_is_retried": True}, True, id="a daemon starts the run again"),
        pytest.param({"executor": DELEGATED}, True, id="the step of a pod"),
    ],
)
def test_whether_another_try_comes_after_a_death(facts: dict[str, Any], comes: bool) -> None:
    step = replace(STEP, **facts)
    assert step.is_followed_by_another is comes
    assert (step.lease_when_attached is None) is comes
    # A step that cannot read its store.
    assert step.detaches(OSError()) is comes


@pytest.mark.parametrize(
    ("number", "facts", "detaches"),
    [
        pytest.param("SIGTERM", {}, True, id="the step's process alone is ended"),
        pytest.param("SIGINT", {}, False, id="the run goes down with its steps"),
        pytest.param("SIGINT", {"run_is_retried": True}, True, id="the run goes down, and a daemon starts it again"),
        pytest.param("SIGTERM", {"is_retried": False}, False, id="no try is left"),
        pytest.param("SIGTERM", {"executor": IN_PROCESS}, False, id="the run's only process goes down"),
        pytest.param("SIGINT", {"executor": DELEGATED}, True, id="the pod of a step is evicted"),
    ],
)
def test_whether_another_try_comes_after_a_signal(number: str, facts: dict[str, Any], detaches: bool) -> None:
    def handler(_signo: int) -> None:
        raise dg.DagsterExecutionInterruptedError

    with pytest.raises(dg.DagsterExecutionInterruptedError) as caught:
        handler(getattr(signal, number))
    assert replace(STEP, **facts).detaches(caught.value) is detaches


def test_the_signal_is_read_off_the_handler_of_this_dagster() -> None:
    with pytest.raises(dg.DagsterExecutionInterruptedError) as caught:  # noqa: PT012, SIM117
        with raise_interrupts_as(dg.DagsterExecutionInterruptedError):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(10)
    assert signal_of(caught.value) == signal.SIGTERM


def test_names_are_stable_distinct_and_can_name_directories() -> None:
    names = [
        run_id_of(root, key, name)
        for root in ("8f14e45f-1", "8f14e45f-2")
        for key in ("train", "train[1]", "train-1", "../deep." + "x" * 300)
        for name in (None, "1", "a/b" * 100)
    ]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 200 and "/" not in name for name in names)
    assert names[0] == run_id_of("8f14e45f-1", "train")
    assert names[0].startswith("8f14e45f-train-")
    assert run_id_of("8f14e45f-1", "train", "tuned").startswith("8f14e45f-train-tuned-")


@pytest.mark.parametrize(
    ("passed", "severity", "accepted"),
    [
        (False, dg.AssetCheckSeverity.ERROR, True),
        # Failed otherwise: the result is delivered again.
        (False, dg.AssetCheckSeverity.WARN, False),
        (True, dg.AssetCheckSeverity.ERROR, False),
    ],
)
def test_what_a_blocking_check_of_the_step_rejects_is_not_delivered_again(
    instance: dg.DagsterInstance, passed: bool, severity: dg.AssetCheckSeverity, accepted: bool
) -> None:
    @dg.asset(check_specs=[dg.AssetCheckSpec("good", asset="model", blocking=True)])
    def model() -> Any:
        yield dg.Output(1)
        yield dg.AssetCheckResult(passed=passed, severity=severity)
        if passed or severity is dg.AssetCheckSeverity.WARN:
            raise RuntimeError("after its output")

    result = dg.materialize([model], instance=instance, raise_on_error=False)
    assert not result.success
    step = replace(STEP, instance=instance)
    assert step.has_accepted({"dagster_run": result.run_id, "step": "model"}) is accepted


@pytest.mark.parametrize(
    ("status", "tags", "retries", "comes"),
    [
        pytest.param("FAILURE", {"dagster/will_retry": "true"}, True, True, id="it is decided"),
        pytest.param("FAILURE", {"dagster/will_retry": "false"}, True, False, id="no retry of the run is left"),
        pytest.param("FAILURE", {}, True, True, id="the run has failed a moment ago"),
        pytest.param("FAILURE", {}, False, False, id="no run is retried"),
        pytest.param("CANCELED", {"dagster/max_retries": "3"}, True, False, id="a user has ended it"),
        pytest.param(None, {}, True, False, id="it was deleted"),
    ],
)
def test_whether_a_run_that_has_ended_comes_again(
    status: str | None, tags: dict[str, str], retries: bool, comes: bool
) -> None:
    run = status and dg.DagsterRun(job_name="job", status=dg.DagsterRunStatus(status), tags=tags)
    instance: Any = SimpleNamespace(get_run_by_id=lambda _: run, run_retries_enabled=retries)
    assert replace(STEP, instance=instance).is_run_retried() is comes
