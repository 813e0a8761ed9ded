"""What the runs of one step are to each other: tries, re-executions one after the other, and at the same time."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from tests.conftest import until

from dagster_rankzero import step_run
from dagster_rankzero._compat import is_from_failure
from dagster_rankzero.step import Step
from dagster_rankzero.step_run import open_run
from rankzero import Launcher, RunHandle
from rankzero.submit.identity import digest_of

LOG = logging.getLogger(__name__)

Open = Callable[..., AbstractContextManager[Any]]


def endless(word: str = "same") -> None:
    import threading

    threading.Event().wait()


@pytest.fixture
def unfinished() -> set[str]:
    """Dagster runs that go on."""
    return set()


@pytest.fixture
def step(unfinished: set[str]) -> Step:
    def get_run_by_id(run_id: str) -> Any:
        status = dg.DagsterRunStatus.STARTED if run_id in unfinished else dg.DagsterRunStatus.FAILURE
        return SimpleNamespace(run_id=run_id, is_finished=run_id not in unfinished, status=status)

    def get_run_group(run_id: str) -> Any:
        return "one", [get_run_by_id(run_id) for run_id in ("one", "two", "three")]

    return Step(
        dagster_run="one",
        root="one",
        generation="one",
        key="train",
        number=0,
        call=0,
        from_failure=False,
        another_follows=True,
        lease=600.0,
        instance=SimpleNamespace(get_run_by_id=get_run_by_id, get_run_group=get_run_group),  # type: ignore[arg-type]
    )


@pytest.fixture
def open_step(tmp_path: Path, marker: str) -> Iterator[Open]:
    launcher = Launcher(1, store=tmp_path / "runs", env={"MARK": marker}, start_timeout=240)

    def open_it(step: Step, *args: Any) -> AbstractContextManager[Any]:
        return open_run(launcher, step, "train", endless, args, {}, LOG)

    yield open_it
    # Nobody follows them to their ends here.
    left = [RunHandle.attach(job.parent) for job in (tmp_path / "runs").glob("*/job.json")]
    for handle in left:
        handle.cancel()
    assert all(handle.wait(30) for handle in left)


def test_re_executions_at_the_same_time_have_trainings_of_their_own(
    step: Step, open_step: Open, unfinished: set[str]
) -> None:
    unfinished |= {"one", "two"}
    again = replace(step, dagster_run="two", generation="two")
    with open_step(step) as (first, _):
        with open_step(again) as (second, _), open_step(replace(again, number=1)) as (taken_up, _):
            assert second.directory != first.directory
            assert taken_up.directory == second.directory
        assert not first.status().final


def test_an_automatic_retry_does_not_meddle_with_a_re_execution(
    step: Step, open_step: Open, unfinished: set[str]
) -> None:
    unfinished |= {"two", "three"}
    # Run "one" has failed; a user re-executes it before its own retry begins.
    with open_step(replace(step, dagster_run="two", generation="two")) as (by_hand, _):
        with open_step(replace(step, dagster_run="three")) as (by_itself, _):
            assert by_itself.directory != by_hand.directory
        assert not by_hand.status().final


def test_a_function_is_told_by_the_plain_values_that_are_bound_to_it() -> None:
    def bound(rate: float) -> Any:
        return lambda: (rate, LOG)

    functions = [bound(0.1), bound(0.2), functools.partial(endless, "a"), functools.partial(endless, "b"), endless]
    facts = [digest_of(step_run._facts_of(function)) for function in functions]
    assert len(set(facts)) == len(functions)
    assert digest_of(step_run._facts_of(bound(0.1))) == facts[0]


def test_a_re_execution_of_a_re_execution_from_failure_is_from_failure_only_after_a_failure() -> None:
    run = SimpleNamespace(tags={"dagster/is_resume_retry": "true"}, parent_run_id="before")
    for succeeded in (True, False):
        parent = SimpleNamespace(is_success=succeeded)
        instance: Any = SimpleNamespace(get_run_by_id=lambda _, parent=parent: parent)
        assert is_from_failure(run, instance) is not succeeded  # type: ignore[arg-type]


def test_a_re_execution_takes_up_what_a_dead_run_has_left(step: Step, open_step: Open, unfinished: set[str]) -> None:
    class Lost(Exception):
        pass

    unfinished.add("one")
    with pytest.raises(Lost), open_step(step) as (left, _):
        raise Lost
    assert not left.status().final
    # Its Dagster run has failed meanwhile.
    unfinished.discard("one")
    with open_step(replace(step, dagster_run="two", generation="two")) as (taken_up, _):
        assert taken_up.directory == left.directory
        assert taken_up.submission == 0


def test_the_last_try_is_not_survived_for_long_by_what_it_took_up(
    step: Step, open_step: Open, unfinished: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_run, "LAST_LEASE", 1.0)
    unfinished.add("one")
    with open_step(step) as (handle, _):
        pass
    with open_step(replace(step, number=1, another_follows=False)) as (taken_up, _):
        assert taken_up.directory == handle.directory
    # A process that was killed says nothing; neither does a block that ends before the run.
    until(lambda: handle.status().final, 60, "the end of the training")
    assert handle.status().state == "cancelled"


def test_other_arguments_end_the_training_that_lives(step: Step, open_step: Open, unfinished: set[str]) -> None:
    unfinished.add("one")
    with open_step(step, "same") as (first, _), open_step(replace(step, number=1), "other") as (second, _):
        assert second.directory == first.directory
        assert second.submission == 1


@pytest.mark.parametrize(
    ("facts", "error", "lives"),
    [
        # The pod of a step is evicted, its run goes on.
        ({}, dg.DagsterExecutionInterruptedError, True),
        ({"another_follows": False}, dg.DagsterExecutionInterruptedError, False),
        # A user has terminated the run.
        ({"dagster_run": "terminated"}, dg.DagsterExecutionInterruptedError, False),
        # A person at a terminal; a generator that was left.
        ({}, KeyboardInterrupt, False),
        ({}, GeneratorExit, False),
        # The step cannot read its store.
        ({}, OSError, True),
    ],
)
def test_who_interrupts_decides_whether_the_training_goes_on(
    step: Step,
    open_step: Open,
    unfinished: set[str],
    facts: dict[str, Any],
    error: type[BaseException],
    lives: bool,
) -> None:
    unfinished.add("one")
    raised = error()
    with pytest.raises(error) as caught, open_step(replace(step, **facts)) as (handle, _):
        raise raised
    assert caught.value is raised
    assert handle.status().final is not lives
