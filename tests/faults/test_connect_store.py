"""Runs on an object store that are driven in their own stage: the executors see nothing else of the run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import until
from tests.engines.connect_server import ConnectServer
from tests.faults.test_connect import WAIT, driver_of, lose_the_driver
from tests.s3 import S3Server

from rankzero import EngineError, Launcher, RunCancelledError, RunHandle, SparkConnectEngine, WorkerFailedError, store
from rankzero.run import RunDirectory
from rankzero.task import staged


@pytest.fixture
def on_store(launcher: Launcher, server: ConnectServer, s3_server: S3Server, bucket: str) -> Iterator[Launcher]:
    """Two ranks on the server, whose executors have the way to the store from the launcher alone."""
    engine, env = SparkConnectEngine(server.url), {**launcher.env, **s3_server.environment}
    yield launcher.options(engine=engine, store=bucket, env=env, run_id="run")
    # Before the servers end: whoever has submitted a stage looks there for its end.
    until(lambda: not submitters(), WAIT, "the end of the submitter")


def submitters() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "rankzero.driver" in command_of(child)]


def drivers_of(server: ConnectServer) -> list[psutil.Process]:
    """Those in its stages."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in below if "rankzero.driver.staged" in command_of(process)]


def command_of(process: psutil.Process) -> str:
    """Empty for one that has ended, also while it is looked at."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def train(folder: str, enough: str) -> list[Any]:
    """Trains until somebody writes a file."""
    import torch

    import rankzero.train as rt

    context = rt.get_context()
    last = rt.get_checkpoint()
    first = last.load()["step"].item() + 1 if last else 0
    print(f"from step {first}", flush=True)
    rt.report({"step": first}, checkpoint={"step": torch.tensor(first)})
    pid = Path(folder, f"pid-{context.attempt}-{context.rank}")
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    until(lambda: os.path.exists(enough), WAIT, enough)
    return [context.attempt, first]


def await_pids(folder: Path, attempt: int = 0) -> list[int]:
    files = [folder / f"pid-{attempt}-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() for file in files), WAIT, "two ranks")
    return [int(file.read_text()) for file in files]


def fail() -> None:
    import rankzero.train as rt

    rt.barrier()
    if rt.get_context().rank == 0:
        raise ValueError("this rank fails")
    rt.barrier()


SUBMIT = """
import json, sys
from tests.faults.test_connect_store import train
from rankzero import Launcher, SparkConnectEngine
url, store, env, *arguments = sys.argv[1:]
launcher = Launcher(2, engine=SparkConnectEngine(url), store=store, env=json.loads(env), run_id="run", max_restarts=1)
launcher.options(start_timeout=240).submit(train, *arguments)
print("submitted", flush=True)
sys.stdin.read()
"""


def test_a_run_on_an_object_store_restarts_and_succeeds_after_every_process_of_its_client_is_killed(
    on_store: Launcher, server: ConnectServer, bucket: str, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    arguments = [server.url, bucket, json.dumps(dict(on_store.env)), str(tmp_path), str(enough)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SUBMIT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "submitted\n"
        ranks = await_pids(tmp_path)
        handle = RunHandle[list[Any]].attach(f"{bucket}/run")
        driver = driver_of(handle)
        for process in [*psutil.Process(client.pid).children(recursive=True), client]:
            process.kill()
    until(handle.checkpoints, WAIT, "a checkpoint")
    os.kill(ranks[1], signal.SIGKILL)
    await_pids(tmp_path, attempt=1)
    assert driver_of(handle) == driver
    enough.touch()
    assert handle.result(WAIT) == [1, 1]
    assert {"from step 0", "from step 1"} <= set(handle.logs(0))


def test_the_first_cause_of_a_run_on_an_object_store_that_is_driven_in_its_stage(on_store: Launcher) -> None:
    handle = on_store.submit(fail)
    with pytest.raises(WorkerFailedError, match="this rank fails") as caught:
        handle.result(WAIT)
    assert caught.value.rank == 0
    assert handle.status().driver_pid not in [submitter.pid for submitter in submitters()]


def test_a_run_on_an_object_store_is_cancelled_in_its_stage(on_store: Launcher, tmp_path: Path) -> None:
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "never"))
    await_pids(tmp_path)
    driver_of(handle)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)


def stale_once(folder: str, enough: str) -> list[Any]:
    """Trains; the second attempt loses its file system."""
    import rankzero.train as rt

    if rt.get_context().attempt == 1:
        rt.barrier()
        if rt.get_context().rank == 0:
            raise OSError("Stale file handle")
        rt.barrier()
    return train(folder, enough)


def test_a_place_that_is_taken_back_and_a_failure_that_restart_on_names_start_ranks_again_within_the_stage(
    on_store: Launcher, tmp_path: Path
) -> None:
    once = on_store.options(max_preemptions=1, max_restarts=1, restart_on=("Stale file handle",))
    handle = once.submit(stale_once, str(tmp_path), str(tmp_path / "enough"))
    ranks = await_pids(tmp_path)
    driver = driver_of(handle)
    until(handle.checkpoints, WAIT, "a checkpoint")
    agent = psutil.Process(ranks[1]).parent()
    assert agent
    agent.terminate()
    await_pids(tmp_path, attempt=2)
    assert driver_of(handle) == driver
    (tmp_path / "enough").touch()
    assert handle.result(WAIT) == [2, 1]
    assert handle.status().preemptions == 1
    assert [event["cause"] for event in handle.events() if event["type"] == "restart"] == ["preempted", "matched"]


def test_a_stage_is_over_when_its_driver_is_done_with_what_comes_after_the_result(
    on_store: Launcher, tmp_path: Path
) -> None:
    from rankzero.tracking import Tracker

    class Slow(Tracker):
        def end(self, run: Any, status: Any) -> None:
            (tmp_path / "ending").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.02)
            (tmp_path / "ended").touch()

    handle = on_store.options(trackers=[Slow()], num_processes=1).submit(float, "0.5")
    assert handle.result(WAIT) == 0.5
    until((tmp_path / "ending").exists, WAIT, "the tracker")
    # Beside the code that it was given it meets its tasks.
    of_tasks = Path(psutil.Process(driver_of(handle)).cmdline()[-1]).parent
    folder = RunDirectory(handle.directory).submission_path(0, "stage-0")
    assert staged.OVER not in [*os.listdir(of_tasks), *store.list_names(folder)]
    (tmp_path / "go").touch()
    until(lambda: staged.OVER in store.list_names(folder), WAIT, "the end of the driver")
    assert (tmp_path / "ended").exists()


def test_a_submitter_that_shall_end_does_not_wait_for_a_store_that_is_silent(
    on_store: Launcher, s3_server: S3Server, tmp_path: Path
) -> None:
    if s3_server.pid is None:
        pytest.skip("not a server of this suite")
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "enough"))
    await_pids(tmp_path)
    driver_of(handle)
    [submitter] = submitters()
    interval = handle.status().interval
    os.kill(s3_server.pid, signal.SIGSTOP)
    try:
        # Then it has asked for a heartbeat.
        time.sleep(interval + 1)
        submitter.terminate()
        # A request that is not answered takes a minute, and is repeated.
        until(lambda: not submitters(), 30, "the end of the submitter")
    finally:
        os.kill(s3_server.pid, signal.SIGCONT)
    (tmp_path / "enough").touch()
    assert handle.result(WAIT) == [0, 0]


@pytest.mark.soak
def test_a_stage_on_an_object_store_that_is_lost_starts_again_with_its_driver(
    on_store: Launcher, tmp_path: Path
) -> None:
    lose_the_driver(on_store, train, await_pids, tmp_path)


@pytest.mark.soak
def test_a_stage_whose_driver_cannot_listen_is_driven_from_where_it_was_submitted(on_store: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        handle = on_store.options(ports=(port, port)).submit(float, "0.5")
        with pytest.raises(EngineError, match="cannot listen for the agents"):
            # Nor can the submitter's driver, which is on the same host.
            handle.result(WAIT)
    assert any("this executor cannot drive the run: its driver cannot listen" in line for line in handle.logs(0))


@pytest.mark.soak
def test_agents_that_wait_for_a_driver_which_begins_no_attempt_end_with_the_run(
    on_store: Launcher, server: ConnectServer, tmp_path: Path
) -> None:
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "never"))
    [driver] = until(lambda: drivers_of(server), WAIT, "a driver in the stage")
    of_tasks = Path(driver.cmdline()[-1]).parent
    [submitter] = submitters()
    # The driver in the stage waits for its word, and then goes on without it.
    submitter.suspend()
    try:
        until(lambda: f"{staged.ATTEMPT}0" in os.listdir(of_tasks), WAIT, "a driver that listens")
        port = json.loads((of_tasks / f"{staged.ATTEMPT}0").read_text())["driver"][1]
        agents = until(lambda: len(found := callers_of(port)) == 2 and found, WAIT, "agents that wait")
        handle.cancel()
        with pytest.raises(RunCancelledError):
            handle.result(WAIT)
        until(lambda: not any(map(psutil.pid_exists, agents)), WAIT, "the end of the agents")
    finally:
        submitter.resume()


def callers_of(port: int) -> set[int | None]:
    """Processes that are connected to a port of this host."""
    return {found.pid for found in psutil.net_connections("tcp") if found.raddr and found.raddr.port == port}


@pytest.mark.soak
def test_an_agent_that_no_longer_moves_ends_with_the_stage(on_store: Launcher, tmp_path: Path) -> None:
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "never"))
    agent = psutil.Process(await_pids(tmp_path)[1]).parent()
    assert agent
    agent.suspend()
    with pytest.raises(EngineError, match="its connection timed out"):
        handle.result(WAIT)
    until(lambda: not agent.is_running(), WAIT, "the end of the agent")
