"""Runs that are driven in their own stage, on a real Spark Connect server: clients, drivers and ranks die."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import free_port, until
from tests.contract.engines.connect_server import ConnectServer, connect_server

from rankzero import EngineError, Launcher, RunCancelledError, RunHandle, SparkConnectEngine
from rankzero.doctor.examine import examine
from rankzero.run.status import RunStatus

WAIT = 120.0


@pytest.fixture
def on_connect(launcher: Launcher, server: ConnectServer) -> Launcher:
    """Two ranks on the server."""
    return launcher.options(engine=SparkConnectEngine(server.url), run_id="run")


def train(folder: str, until_file: str = "", dies: bool = False) -> list[Any]:
    """Trains until somebody writes a file; in its first attempt a rank may die instead."""
    import torch

    import rankzero.train as rt

    context = rt.get_context()
    last = rt.get_checkpoint()
    first = last.load()["step"].item() + 1 if last else 0
    print(f"from step {first}", flush=True)
    rt.report({"step": first}, checkpoint={"step": torch.tensor(first)})
    up = Path(folder, f"up-{context.attempt}-{context.rank}")
    up.with_suffix(".new").write_text(str(os.getpid()))
    up.with_suffix(".new").rename(up)
    if dies and context.attempt == 0:
        if context.rank == 1:
            until(Path(folder, "die").exists, WAIT, "the word to die")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    if until_file:
        until(lambda: os.path.exists(until_file), WAIT, until_file)
    return [context.attempt, first]


SUBMIT = """
import sys
from tests.faults.test_connect import train
from rankzero import Launcher, SparkConnectEngine
url, store, mark, *arguments = sys.argv[1:]
launcher = Launcher(2, engine=SparkConnectEngine(url), store=store, env={"MARK": mark}, run_id="run", start_timeout=240)
launcher.submit(train, *arguments)
print("submitted", flush=True)
sys.stdin.read()
"""


def await_ranks(folder: Path, attempt: int = 0) -> None:
    until(lambda: all((folder / f"up-{attempt}-{rank}").exists() for rank in range(2)), WAIT, "two ranks")


def driver_of(handle: RunHandle[Any]) -> int:
    """The process that drives the run, which must be on an executor."""
    pid = until(lambda: is_on_executor(handle.status()), WAIT, "a driver in the stage")
    assert pid
    return pid


def is_on_executor(status: RunStatus) -> int | None:
    if status.driver_pid is None:
        return None
    try:
        parents = [parent.name() for parent in psutil.Process(status.driver_pid).parents()]
    except psutil.NoSuchProcess:
        return None
    return status.driver_pid if "java" in parents else None


def test_a_run_goes_on_when_every_process_of_its_client_is_killed(
    server: ConnectServer, tmp_path: Path, marker: str
) -> None:
    store, enough = tmp_path / "store", tmp_path / "enough"
    command = [sys.executable, "-c", SUBMIT, server.url, str(store), marker, str(tmp_path), str(enough)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "submitted\n"
        await_ranks(tmp_path)
        handle = RunHandle[list[Any]].attach(store / "run")
        driver_of(handle)
        for process in [*psutil.Process(client.pid).children(recursive=True), client]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    enough.touch()
    assert handle.result(WAIT) == [0, 0]
    assert "from step 0" in list(handle.logs(0))
    until((store / "run" / "report.html").exists, WAIT, "the report, which the driver there writes")


def test_a_run_in_its_stage_is_cancelled(on_connect: Launcher, tmp_path: Path) -> None:
    handle = on_connect.submit(train, str(tmp_path), str(tmp_path / "never"))
    await_ranks(tmp_path)
    driver_of(handle)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)


def test_a_client_that_is_killed_before_its_stage_has_begun_is_noticed(on_connect: Launcher, tmp_path: Path) -> None:
    busy = on_connect.options(num_processes=3, run_id="busy").submit(train, str(tmp_path), str(tmp_path / "never"))
    await_ranks(tmp_path)
    handle = RunHandle[Any].attach(on_connect.options(start_timeout=2 * WAIT).submit(float, "0.5").directory)
    os.kill(until(lambda: handle.status().driver_pid, WAIT, "the client") or 0, signal.SIGKILL)
    with pytest.raises(EngineError, match="died without ending the run"):
        handle.result(WAIT)
    busy.cancel()


@pytest.mark.soak
def test_the_client_of_a_server_that_died_exits(launcher: Launcher, tmp_path: Path) -> None:
    with connect_server(tmp_path) as server:
        on_it = launcher.options(engine=SparkConnectEngine(server.url))
        handle = on_it.submit(train, str(tmp_path), str(tmp_path / "never"))
        await_ranks(tmp_path)
        driver_of(handle)
        (client,) = [child for child in psutil.Process().children() if handle.directory in child.cmdline()]
        server.process.kill()
        client.wait(WAIT)
    assert handle.status().state == "failed"


@pytest.mark.soak
@pytest.mark.parametrize("seen", [True, False])
def test_a_run_directory_on_an_object_store(
    launcher: Launcher, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: bool
) -> None:
    """The client drives the run. Where executors have no way to the store, what they write goes through the client."""
    enough = tmp_path / "enough"
    with pytest.MonkeyPatch.context() as of_server:
        if not seen:
            of_server.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        with connect_server(tmp_path) as own:
            of_server.undo()
            on_it = launcher.options(engine=SparkConnectEngine(own.url), store=bucket)
            handle = on_it.submit(train, str(tmp_path), str(enough))
            await_ranks(tmp_path)
            assert not is_on_executor(handle.status())
            enough.touch()
            assert handle.result(WAIT) == [0, 0]
            assert "from step 0" in list(handle.logs(0))
            assert handle.checkpoints()
            found = examine(SparkConnectEngine(own.url), store=bucket)
    (store,) = [finding for finding in found.findings if finding.about == "store"]
    assert store.level == ("ok" if seen else "warning"), found


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="servers apart are made of Linux namespaces, which need root"
)
# A zygote of the suite's is in the namespaces of the suite, and so are its forks.
@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.soak
@pytest.mark.parametrize(("is_hidden", "is_apart"), [(True, False), (False, True), (True, True)])
def test_executors_that_do_not_see_the_run_directory_or_cannot_reach_the_client(
    launcher: Launcher, tmp_path: Path, is_hidden: bool, is_apart: bool
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with connect_server(tmp_path, hidden=store if is_hidden else None, apart=is_apart) as server:
        handle = launcher.options(engine=SparkConnectEngine(server.url), store=store).submit(train, str(tmp_path))
        if is_hidden and is_apart:
            with pytest.raises(EngineError, match="must reach this host by TCP .* or see the run directory"):
                handle.result(WAIT)
            return
        assert handle.result(WAIT) == [0, 0]
        assert "from step 0" in list(handle.logs(0))
        assert handle.metrics()[0]["step"] == 0
        # What follows the stage would wait for a server that has gone.
        handle.await_driver(WAIT)
    # The client drives what no driver in the stage could.
    assert not is_hidden or "driven from this host" in Path(handle.own.path("driver.log")).read_text()
