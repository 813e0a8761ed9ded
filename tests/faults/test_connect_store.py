"""Runs on an object store that are driven in their own stage: the executors see nothing else of the run."""

import json
import os
import signal
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

from rankzero import EngineError, Launcher, RunCancelledError, RunHandle, SparkConnectEngine, WorkerFailedError


@pytest.fixture
def on_store(launcher: Launcher, server: ConnectServer, s3_server: S3Server, bucket: str) -> Iterator[Launcher]:
    """Two ranks on the server, whose executors have the way to the store from the launcher alone."""
    engine, env = SparkConnectEngine(server.url), {**launcher.env, **s3_server.environment}
    yield launcher.options(engine=engine, store=bucket, env=env, run_id="run")
    # Before the servers end: whoever has submitted a stage looks there for its end.
    until(lambda: not submitters(), WAIT, "the end of the submitter")


def submitters() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "rankzero.driver" in command_of(child)]


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
def test_an_agent_that_no_longer_moves_ends_with_the_stage(on_store: Launcher, tmp_path: Path) -> None:
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "never"))
    agent = psutil.Process(await_pids(tmp_path)[1]).parent()
    assert agent
    agent.suspend()
    with pytest.raises(EngineError, match="not heard of any more"):
        handle.result(WAIT)
    until(lambda: not agent.is_running(), WAIT, "the end of the agent")
