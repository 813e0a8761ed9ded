"""Runs on an object store that are driven in their own stage: the executors see nothing else of the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import until
from tests.engines.connect_server import ConnectServer
from tests.faults.test_connect import WAIT, await_ranks, driver_of, train
from tests.s3 import S3Server

from rankzero import Launcher, RunCancelledError, RunHandle, SparkConnectEngine, WorkerFailedError


@pytest.fixture
def on_store(launcher: Launcher, server: ConnectServer, s3_server: S3Server, bucket: str) -> Launcher:
    """Two ranks on the server, whose executors have the way to the store from the launcher alone."""
    engine, env = SparkConnectEngine(server.url), {**launcher.env, **s3_server.environment}
    return launcher.options(engine=engine, store=bucket, env=env, run_id="run")


def fail(folder: str) -> None:
    import rankzero.train as rt

    Path(folder, f"up-0-{rt.get_context().rank}").touch()
    rt.barrier()
    if rt.get_context().rank == 0:
        raise ValueError("this rank fails")
    rt.barrier()


SUBMIT = """
import json, sys
from tests.faults.test_connect import train
from rankzero import Launcher, SparkConnectEngine
url, store, env, *arguments = sys.argv[1:]
launcher = Launcher(2, engine=SparkConnectEngine(url), store=store, env=json.loads(env), run_id="run", start_timeout=240)
launcher.submit(train, *arguments)
print("submitted", flush=True)
sys.stdin.read()
"""


def test_a_run_on_an_object_store_goes_on_when_every_process_of_its_client_is_killed(
    on_store: Launcher, server: ConnectServer, bucket: str, tmp_path: Path
) -> None:
    import json

    enough = tmp_path / "enough"
    arguments = [server.url, bucket, json.dumps(dict(on_store.env)), str(tmp_path), str(enough)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SUBMIT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "submitted\n"
        await_ranks(tmp_path)
        handle = RunHandle[list[Any]].attach(f"{bucket}/run")
        driver_of(handle)
        for process in [*psutil.Process(client.pid).children(recursive=True), client]:
            process.kill()
    enough.touch()
    assert handle.result(WAIT) == [0, 0]
    assert "from step 0" in list(handle.logs(0))
    assert [event["state"] for event in handle.events() if event["type"] == "state"][-1] == "succeeded"


def test_ranks_on_an_object_store_that_die_start_again_within_the_stage(on_store: Launcher, tmp_path: Path) -> None:
    handle = on_store.options(max_restarts=1).submit(train, str(tmp_path), dies=True)
    await_ranks(tmp_path)
    driver = driver_of(handle)
    await_ranks(tmp_path, attempt=1)
    assert handle.status().driver_pid == driver
    assert handle.result(WAIT)[0] == 1


def test_the_first_cause_comes_from_a_stage_that_the_store_alone_is_heard_of(
    on_store: Launcher, tmp_path: Path
) -> None:
    handle = on_store.submit(fail, str(tmp_path))
    await_ranks(tmp_path)
    driver_of(handle)
    with pytest.raises(WorkerFailedError, match="this rank fails") as caught:
        handle.result(WAIT)
    assert caught.value.rank == 0


def test_a_run_on_an_object_store_is_cancelled_in_its_stage(on_store: Launcher, tmp_path: Path) -> None:
    handle = on_store.submit(train, str(tmp_path), str(tmp_path / "never"))
    await_ranks(tmp_path)
    driver_of(handle)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)


@pytest.mark.soak
def test_a_stage_on_an_object_store_that_is_lost_starts_again_with_its_driver(
    on_store: Launcher, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    handle = on_store.options(max_restarts=1).submit(train, str(tmp_path), str(enough))
    await_ranks(tmp_path)
    until(handle.checkpoints, WAIT, "a checkpoint")
    os.kill(driver_of(handle), signal.SIGKILL)
    await_ranks(tmp_path, attempt=1)
    enough.touch()
    assert handle.result(WAIT) == [1, 1]
    assert any(event["type"] == "restart" and event["cause"] == "lost" for event in handle.events())
