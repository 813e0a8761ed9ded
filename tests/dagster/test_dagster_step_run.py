"""The run of a step's training: tries, re-executions one after the other, and at the same time."""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from tests.conftest import until

from dagster_rankzero import step as steps
from dagster_rankzero._compat import MULTIPROCESS
from dagster_rankzero.step import Step, follow, open_run, run_id_of
from rankzero import InvalidJobError, Launcher, RankZeroError, RunHandle
from rankzero.pipeline import EngineOpened, LineWritten

LOG = logging.getLogger(__name__)

Open = Callable[..., AbstractContextManager[Any]]


class Try:
    """Stands for Dagster's own object of a try."""


def endless(word: str = "same") -> None:
    import threading

    threading.Event().wait()


@pytest.fixture
def unfinished() -> set[str]:
    """Dagster runs that go on."""
    return set()


@pytest.fixture
def retried() -> set[str]:
    """Dagster runs that Dagster starts again by itself once they have failed."""
    return set()


@pytest.fixture
def step(unfinished: set[str], retried: set[str]) -> Step:
    def get_run_by_id(run_id: str) -> Any:
        status = dg.DagsterRunStatus.STARTED if run_id in unfinished else dg.DagsterRunStatus.FAILURE
        tags = {"dagster/will_retry": "true"} if run_id in retried else {}
        return SimpleNamespace(run_id=run_id, is_finished=run_id not in unfinished, status=status, tags=tags)

    return Step(
        dagster_run="one",
        root="one",
        generation="one",
        key="train",
        number=0,
        executor=MULTIPROCESS,
        is_retried=True,
        run_is_retried=False,
        lease=600.0,
        instance=SimpleNamespace(  # type: ignore[arg-type]
            get_run_by_id=get_run_by_id,
            get_run_step_stats=lambda *_: [],
            all_logs=lambda *_, **__: [],
            run_retries_enabled=False,
        ),
    )


@pytest.fixture
def open_step(tmp_path: Path, marker: str) -> Iterator[Open]:
    launcher = Launcher(1, store=tmp_path / "runs", env={"MARK": marker}, start_timeout=240)

    def open_it(step: Step, *args: Any, context: Any = None, name: str | None = None) -> AbstractContextManager[Any]:
        # Each stands for a process of its own, unless a context is given.
        context = context or SimpleNamespace(log=LOG, _step_execution_context=Try())
        return open_run(launcher, step, context, endless, args, {}, name)

    yield open_it
    # Nobody follows them to their ends here.
    left = [RunHandle.attach(job.parents[1]) for job in (tmp_path / "runs").glob("*/submissions/0.json")]
    for handle in left:
        handle.cancel()
    assert all(handle.wait(120) for handle in left)


@pytest.mark.parametrize("comes", ["by hand", "by itself"])
def test_no_run_ends_the_training_of_a_re_execution_that_is_running(
    step: Step, open_step: Open, unfinished: set[str], comes: str
) -> None:
    unfinished |= {"two", "three"}
    # Run "one" has failed, and a user has re-executed it.
    again = replace(step, dagster_run="two", generation="two")
    other = replace(step, dagster_run="three", generation="three" if comes == "by hand" else "one")
    with open_step(again, "of two") as first:
        with pytest.raises(dg.Failure, match="belongs to the Dagster run two, which is running") as refused:  # noqa: SIM117
            with open_step(other, "of three"):
                pass
        assert not refused.value.allow_retries
        assert not first.status().final
        with open_step(replace(again, number=1), "of its retry") as retried:
            assert retried.job.submission == 0
        # No step of that run follows it any more.
        unfinished.discard("two")
        with open_step(other, "of two") as attached:
            assert attached.directory == first.directory
            assert attached.job.submission == 0


def test_a_directory_that_is_not_ours_is_refused_before_it_is_read(step: Step, open_step: Open, tmp_path: Path) -> None:
    planted = tmp_path / "runs" / run_id_of(step.root, step.key)
    (planted / "submissions" / "0.json").mkdir(parents=True)
    planted.chmod(0o777)
    with pytest.raises(InvalidJobError, match="can be written by every user"), open_step(step):
        pass
    shutil.rmtree(planted)


def test_an_instance_that_cannot_be_queried_is_no_running_owner(
    step: Step, open_step: Open, unfinished: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Down(Exception):
        pass

    def query(run_id: str) -> Any:
        raise Down

    unfinished.add("one")
    with open_step(step) as first:
        with monkeypatch.context() as patch:
            patch.setattr(step.instance, "get_run_by_id", query)
            # The step fails with Dagster's error, and so is tried again.
            with pytest.raises(Down), open_step(replace(step, dagster_run="two", generation="two")):
                pass
        assert not first.status().final


def test_the_last_try_is_not_survived_for_long_by_what_it_attached_to(
    step: Step, open_step: Open, unfinished: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    unfinished.add("one")
    with open_step(step) as handle:
        pass
    with open_step(replace(step, number=1, is_retried=False)) as attached:
        assert attached.directory == handle.directory
    # A process that was killed says nothing; neither does a block that ends before the run.
    until(lambda: handle.status().final, 60, "the end of the training")
    assert handle.status().state == "cancelled"


@pytest.mark.parametrize(
    ("name", "told"), [(None, "already trained without a name"), ("tuned", "under the name 'tuned'")]
)
def test_a_second_training_of_a_name_is_refused(step: Step, open_step: Open, name: str | None, told: str) -> None:
    this_try = SimpleNamespace(log=LOG, _step_execution_context=Try())
    with open_step(step, context=this_try, name=name) as first:
        for args in ((), ("other",)):
            refused = open_step(step, *args, context=this_try, name=name)
            with pytest.raises(InvalidJobError, match=rf"{told}: .*options\(name="), refused:
                pass
        assert not first.status().final
        assert first.job.submission == 0


def test_the_step_s_log_has_the_address_of_the_spark_ui_while_ranks_train(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Following:
        ended = True

        def poll(self) -> Iterator[Any]:
            yield EngineOpened("http://driver:4040")
            yield LineWritten("[0] trains")

    monkeypatch.setattr(steps, "Follower", lambda *_, **__: Following())
    caplog.set_level(logging.INFO)
    opened: Any = SimpleNamespace(id="run", attached=False)
    assert list(follow(opened, None, LOG, None)) == []
    assert "[0] trains" in capsys.readouterr().out
    assert "http://driver:4040" in caplog.text


def test_a_training_ends_whose_dagster_run_was_deleted(
    step: Step, open_step: Open, unfinished: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.005")
    unfinished.add("one")
    with open_step(step) as opened:
        until(lambda: opened.status().state == "running", 60, "the training")
        unfinished.discard("one")
        assert list(follow(opened, step, LOG, None)) == []
    assert opened.status().state == "cancelled"
    assert "on request: the Dagster run has ended or was deleted" in str(opened.status().error)


def test_a_step_whose_run_is_dead_leaves_its_training_to_the_run_that_follows_by_itself(
    step: Step, open_step: Open, unfinished: set[str], retried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.005")
    unfinished.add("one")
    with pytest.raises(RankZeroError, match="left to"), open_step(step) as left:  # noqa: PT012
        # Its run's process was killed, and monitoring marks the run; the process of the step lives.
        unfinished.discard("one")
        retried.add("one")
        list(follow(left, step, LOG, None))
    assert not left.status().final


def test_the_process_that_a_training_needs_stays_until_the_run_that_follows_has_ended(
    step: Step, open_step: Open, unfinished: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.005")
    last = replace(step, is_retried=False)
    ended: list[str] = []

    def follow_to_the_end() -> None:
        with pytest.raises(RankZeroError, match="left to"), open_step(last) as left:  # noqa: PT012
            opened.append(left)
            unfinished.discard("one")
            assert attached.wait(60)
            list(follow(left, last, LOG, None))
        ended.append(left.status().state)

    opened: list[RunHandle[Any]] = []
    attached = threading.Event()
    unfinished.add("one")
    thread = threading.Thread(target=follow_to_the_end)
    thread.start()
    until(lambda: opened and "one" not in unfinished, 60, "a dead run")
    unfinished.add("two")
    with open_step(replace(last, dagster_run="two", generation="two")) as again:
        attached.set()
        assert again.attached
        assert again.directory == opened[0].directory
        thread.join(1.0)
        assert not again.status().final
        assert thread.is_alive()
    unfinished.discard("two")
    thread.join(60)
    assert ended == ["cancelled"]
