"""Runs as barrier stages of real Spark: the caller's session, and sessions in a driver of their own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until, wait_until_gone
from tests.contract.engines.pickled_late import PickledLate
from tests.runs import lines_of
from tests.services import spark_session

from rankzero import (
    EngineError,
    InsufficientSlotsError,
    Launcher,
    RunCancelledError,
    RunHandle,
    SparkEngine,
)
from rankzero.engines.base import AgentGroup
from rankzero.engines.spark.stage import with_own_python
from rankzero.job import Job
from rankzero.run.directory import RunDirectory

WAIT = 120.0


def who_am_i() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    )
    me = {name: os.environ[name] for name in names}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"hello from {me['RANK']}")
    return {"ranks": everyone, "sum": total.item(), "python": sys.executable, "pid": os.getpid()}


@pytest.fixture
def on_session(launcher: Launcher, session: Any) -> Launcher:
    return launcher.options(engine=SparkEngine(session=session))


def test_a_run_uses_the_callers_session_and_leaves_it_alone(
    on_session: Launcher, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    context = session.sparkContext
    context.setLocalProperty("mine", "untouched")
    assert session.range(3).count() == 3
    conf, environment = sorted(context.getConf().getAll()), dict(os.environ)
    handler, python = signal.getsignal(signal.SIGINT), context.pythonExec
    first = on_session.run(who_am_i)
    assert first["sum"] == 2.0
    assert first["python"] == sys.executable
    ranks = [{**rank, "CUDA_VISIBLE_DEVICES": ""} for rank in first["ranks"]]
    assert ranks == first["ranks"]
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert [rank["NODE_RANK"] for rank in ranks] == ["0", "1"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "0"]
    assert "[1] hello from 1" in capsys.readouterr().out
    assert session.range(3).count() == 3
    assert sorted(context.getConf().getAll()) == conf
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) is handler
    assert context.pythonExec == python
    assert context.getLocalProperty("mine") == "untouched"


def test_a_task_runs_several_processes(on_session: Launcher) -> None:
    ranks = on_session.options(num_processes=4, processes_per_task=2).run(who_am_i)["ranks"]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert [rank["NODE_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}


def test_the_job_has_its_own_group_and_description(on_session: Launcher, session: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def wait() -> str:
        while not go.exists():
            time.sleep(0.02)
        return "done"

    on_session = on_session.options(num_processes=1, run_id="grouped")
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(on_session.run, wait)
        (number,) = until(session.sparkContext.statusTracker().getActiveJobsIds, WAIT, "a job")
        job = session.sparkContext._jsc.sc().statusStore().job(number)
        go.touch()
        assert value.result(WAIT) == "done"
    # Another store may have a run of this name, which uses the same session.
    assert re.fullmatch("rankzero-grouped-[0-9a-f]{8}", job.jobGroup().get())
    assert job.description().get() == "rankzero: wait on 1 ranks, run grouped"


def test_a_run_is_cancelled_by_its_directory(on_session: Launcher, marker: str) -> None:
    def train() -> None:
        print("asleep", flush=True)
        while True:
            time.sleep(0.1)

    on_session = on_session.options(run_id="cancelled")
    with ThreadPoolExecutor(1) as executor:
        value = executor.submit(on_session.run, train)
        until(lambda: lines_of(f"{on_session.store}/cancelled") or value.done(), WAIT, "a line")
        RunHandle.attach(f"{on_session.store}/cancelled").cancel()
        with pytest.raises(RunCancelledError):
            value.result(WAIT)
    assert wait_until_gone(marker) == []


@pytest.fixture
def group(session: Any) -> Iterator[tuple[AgentGroup, PickledLate, Future[BaseException | None]]]:
    """Returns agents whose function is being pickled: Spark has no job of them."""
    value = PickledLate()
    ended: Future[BaseException | None] = Future()
    engine = SparkEngine(session=session).open(Job("run", "train", 1, 1, False, None, None, 60.0, {}), {})
    group = engine.launch(1, {"env": {}, "value": value}, ended.set_result)
    assert value.begun.wait(WAIT)
    yield group, value, ended
    group.cancel()
    value.may_end.set()
    assert group.wait(WAIT)


def test_agents_that_are_cancelled_before_spark_has_their_job_never_start(group: Any, session: Any) -> None:
    if session.version < "4":
        pytest.skip("Spark 3.5 cannot cancel future jobs")
    agents, value, ended = group
    agents.cancel()
    value.may_end.set()
    assert "SPARK_JOB_CANCELLED" in str(ended.result(WAIT))


def test_cancelling_the_spark_job_ends_the_run_with_that_cause(
    on_session: Launcher, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The words of Spark may come long after the end of its tasks.
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "15")

    def train() -> None:
        while True:
            time.sleep(0.1)

    def cancel_when_it_runs() -> None:
        tracker = session.sparkContext.statusTracker()
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            run = RunDirectory(os.path.join(str(on_session.store), "foreign"))
            if tracker.getActiveJobsIds() and run.newest()[1]:
                status = RunHandle.attach(run.directory).status()
                if status.state == "running":
                    session.sparkContext.cancelAllJobs()
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=cancel_when_it_runs)
    thread.start()
    with pytest.raises(EngineError, match="cancelled from outside"):
        on_session.options(run_id="foreign").run(train)
    thread.join()


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        (
            {"num_processes": 5},
            InsufficientSlotsError,
            "needs 5 task slots at the same time, but the cluster at 'local.4.' has 4",
        ),
        ({"use_gpu": True}, InsufficientSlotsError, "needs 2 GPUs"),
    ],
)
def test_what_the_session_cannot_give_is_said_at_once(
    on_session: Launcher, launch: dict[str, Any], error: type[Exception], message: str
) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        on_session.options(**launch).run(who_am_i)
    assert time.monotonic() - started < 10  # Spark itself takes ten minutes


def test_a_large_payload_does_not_pass_through_the_jvm(on_session: Launcher) -> None:
    data = bytes(80 << 20)
    assert on_session.options(num_processes=1).run(len, data) == 80 << 20


# -- sessions of our own, in a driver process -------------------------------------------------------


def test_an_embedded_master_needs_nothing_set(tmp_path: Path, marker: str) -> None:
    """No PYSPARK_PYTHON, no JAVA_HOME, no session; the caller gets no JVM."""
    program = f"""
import sys, os
from rankzero import Launcher, SparkEngine
def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return [x.item(), sys.executable]
launcher = Launcher(2, engine=SparkEngine(), store={str(tmp_path)!r}, env={{"MARK": {marker!r}}})
print("value", launcher.run(train), "pyspark" in sys.modules)
"""
    clean = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean, timeout=WAIT)
    assert f"value [2.0, '{sys.executable}'] False" in done.stdout, done.stderr


def test_runs_side_by_side_leave_the_python_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    context = types.SimpleNamespace(master="local[2]", pythonExec="python3")
    entered, leave = threading.Event(), threading.Event()

    def beside() -> None:
        with with_own_python(context):
            entered.set()
            leave.wait(WAIT)

    other = threading.Thread(target=beside, daemon=True)
    with with_own_python(context):
        other.start()
        assert not entered.wait(0.3)
        assert context.pythonExec == sys.executable
    assert entered.wait(WAIT)
    assert context.pythonExec == sys.executable
    leave.set()
    other.join()
    assert context.pythonExec == "python3"


@pytest.fixture
def use_python(session: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the session run another Python, as a user does who sets PYSPARK_PYTHON before the session starts."""

    def use(python: str) -> None:
        monkeypatch.setenv("PYSPARK_PYTHON", python)
        monkeypatch.setattr(session.sparkContext, "pythonExec", python)

    return use


def test_an_executor_without_torch_is_named(
    on_session: Launcher, use_python: Callable[[str], None], tmp_path: Path
) -> None:
    import venv

    venv.create(tmp_path / "bare", symlinks=True)
    use_python(str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(EngineError, match="torch cannot be imported by .*bare/bin/python.*Install torch there"):
        on_session.run(who_am_i)


def test_a_session_that_was_stopped_is_refused(on_session: Launcher, session: Any) -> None:
    """The last test of this file: the session of all of them is stopped."""
    session.stop()
    with pytest.raises(EngineError, match="was stopped"):
        on_session.run(len, [1])
    with spark_session("local[2]") as another:
        assert on_session.options(engine=SparkEngine(session=another)).run(len, [1, 2]) == 2


@pytest.mark.soak
def test_a_master_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """Spark tries for a minute."""
    with pytest.raises(EngineError, match="no Spark master answers at 'spark://localhost:1'") as raised:
        Launcher(engine=SparkEngine("spark://localhost:1"), store=tmp_path).run(print)
    assert raised.value.code == "RZ-2001"
