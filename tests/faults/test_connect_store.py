"""Runs on an object store, which on Spark Connect are driven by a process of the submitter."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import until
from tests.engines.connect_server import ConnectServer
from tests.faults.test_connect import WAIT
from tests.s3 import S3Server

from rankzero import Launcher, RunHandle, SparkConnectEngine


@pytest.fixture
def on_store(launcher: Launcher, server: ConnectServer, s3_server: S3Server, bucket: str) -> Launcher:
    """Two ranks on the server, whose executors have the way to the store from the launcher alone."""
    engine, env = SparkConnectEngine(server.url), {**launcher.env, **s3_server.environment}
    return launcher.options(engine=engine, store=bucket, env=env, run_id="run")


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


SUBMIT = """
import json, sys
from tests.faults.test_connect_store import train
from rankzero import Launcher, SparkConnectEngine
url, store, env, *arguments = sys.argv[1:]
launcher = Launcher(2, engine=SparkConnectEngine(url), store=store, env=json.loads(env), run_id="run")
launcher.options(start_timeout=240).submit(train, *arguments)
print("submitted", flush=True)
sys.stdin.read()
"""


@pytest.mark.soak
def test_the_next_submission_resumes_a_run_on_an_object_store_whose_client_is_killed(
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
        until(handle.checkpoints, WAIT, "a checkpoint")
        for process in [*psutil.Process(client.pid).children(recursive=True), client]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    until(lambda: not any(map(psutil.pid_exists, ranks)), WAIT, "the end of the ranks")
    again = on_store.submit(train, str(tmp_path), str(enough))
    await_pids(tmp_path, attempt=1)
    enough.touch()
    assert again.result(WAIT) == [1, 1]
    assert "from step 1" in set(again.logs(0))


def stale_once(folder: str, enough: str) -> list[Any]:
    """Trains; the second attempt loses its file system."""
    import rankzero.train as rt

    if rt.get_context().attempt == 1:
        other = Path(folder, "other")
        if rt.get_context().rank == 0:
            until(other.exists, WAIT, "the other rank")
            raise OSError("Stale file handle")
        # In no collective, whose end might be known before its cause is.
        other.touch()
        time.sleep(WAIT)
    return train(folder, enough)


def test_a_place_that_is_taken_back_and_a_failure_that_restart_on_names_start_ranks_again(
    on_store: Launcher, tmp_path: Path
) -> None:
    once = on_store.options(max_preemptions=1, max_restarts=1, restart_on=("Stale file handle",))
    handle = once.submit(stale_once, str(tmp_path), str(tmp_path / "enough"))
    ranks = await_pids(tmp_path)
    until(handle.checkpoints, WAIT, "a checkpoint")
    agent = psutil.Process(ranks[1]).parent()
    assert agent
    agent.terminate()
    await_pids(tmp_path, attempt=2)
    (tmp_path / "enough").touch()
    assert handle.result(WAIT) == [2, 1]
    assert handle.status().preemptions == 1
    assert [event["cause"] for event in handle.events() if event["type"] == "restart"] == ["preempted", "matched"]
