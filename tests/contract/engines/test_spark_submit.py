"""A driver on the cluster: it outlives whoever submitted it, and what is secret is nowhere to be seen."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import servers
from tests.conftest import ROOT, find, free_port, until
from tests.contract.engines.conftest import Standalone

from rankzero import (
    EngineError,
    Launcher,
    RunHandle,
    SparkSubmitEngine,
)

WAIT = 240.0
# Not in this source, which is shipped with the run.
SECRET = "-".join(["geheim", "4711", "nirgends"])


def cluster_engine(master: str, **conf: str) -> SparkSubmitEngine:
    settings = {
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.cores.max": "2",
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
        "spark.hadoop.fs.s3a.secret.key": SECRET,
        **conf,
    }
    return SparkSubmitEngine(master, conf=settings)


@pytest.fixture
def detached(launcher: Launcher, cluster: Standalone) -> Launcher:
    """Two ranks whose driver is the cluster's."""
    env = {**(launcher.env or {}), "MY_TOKEN": SECRET}
    return launcher.options(engine=cluster_engine(cluster.url), env=env)


def who_is_there() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return {"sum": x.item(), "secret": len(os.environ["MY_TOKEN"]), "directory": os.getcwd()}


def files_with(directory: Path, word: str) -> list[str]:
    """Of what lies there now: a driver that ends, and Spark behind it, still remove and rename theirs."""
    files = [os.path.join(place, name) for place, _, names in os.walk(directory) for name in names]
    return [path for path in files if word.encode() in content(path)]


def content(path: str) -> bytes:
    """Nothing of what is gone by now."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(path).read_bytes()
    return b""


def test_the_driver_runs_on_the_cluster_and_no_secret_is_in_a_file_or_command(
    detached: Launcher, tmp_path: Path, cluster: Standalone
) -> None:
    handle = detached.submit(who_is_there)
    status = handle.status()
    commands = [content(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    found = handle.result(timeout=WAIT)
    assert found["sum"] == 2.0
    assert found["secret"] == len(SECRET)
    assert "/work/worker" in found["directory"]
    assert status.driver_pid != os.getpid()
    assert [command for command in commands if SECRET.encode() in command] == []
    assert files_with(tmp_path, SECRET) == []
    assert files_with(cluster.logs, SECRET) == []
    until((Path(handle.directory) / "report.html").exists, WAIT, "the report, of which the driver's zip has the page")


def wait_for_file(path: str) -> str:
    import rankzero.train as rt

    print("training")
    rt.report({"step": 1})
    while not os.path.exists(path):
        time.sleep(0.05)
    return "went on"


def kill_driver_jvm(pid: int) -> None:
    """Ends the process of the cluster below which a driver is, as a cluster does that kills an application."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"PythonRunner" in Path(f"/proc/{parent}/cmdline").read_bytes()
    os.kill(parent, signal.SIGKILL)


@pytest.mark.soak
def test_a_driver_ends_with_its_application_and_the_run_goes_on_elsewhere(detached: Launcher, tmp_path: Path) -> None:
    named = detached.options(run_id="killed")
    handle = named.submit(wait_for_file, str(tmp_path / "go"))
    until(lambda: handle.metrics(), WAIT, "the training")
    kill_driver_jvm(handle.status().driver_pid or 0)
    assert handle.wait(timeout=WAIT)
    assert handle.status().state in ("failed", "cancelled")
    (tmp_path / "go").touch()
    assert named.submit(wait_for_file, str(tmp_path / "go")).result(timeout=WAIT) == "went on"


@pytest.mark.soak
def test_a_run_ends_when_the_process_that_called_run_is_killed(
    tmp_path: Path, cluster: Standalone, marker: str
) -> None:
    store = tmp_path / "store"
    program = "import sys; from pathlib import Path; from tests.contract.engines import test_spark_submit as t; "
    program += "t.run_and_wait(sys.argv[1], Path(sys.argv[2]), sys.argv[3])"
    caller = subprocess.Popen([sys.executable, "-c", program, cluster.url, str(store), marker], cwd=ROOT)
    try:
        until((store / "owned" / "submissions" / "0.json").exists, WAIT, "the run")
        handle: RunHandle[str] = RunHandle.attach(store / "owned")
        until(lambda: handle.own.status().metrics, WAIT, "the training")
    finally:
        caller.kill()
        caller.wait()
    until(lambda: handle.own.status().final, WAIT, "its end, of which nobody asks")
    assert handle.status().state == "cancelled"


def run_and_wait(master: str, store: Path, marker: str) -> None:
    launcher = Launcher(2, store=store, engine=cluster_engine(master), env={"MARK": marker}, run_id="owned")
    launcher.run(wait_for_file, str(store / "go"))


@pytest.mark.soak
def test_a_cluster_that_cannot_be_reached_fails_the_run_with_its_words(launcher: Launcher) -> None:
    nobody = launcher.options(engine=cluster_engine(f"spark://127.0.0.1:{free_port()}"), run_id="nobody")
    with pytest.raises(EngineError, match="did not take the driver"):
        nobody.submit(who_is_there)
    found = find(nobody)
    assert found is not None
    assert found.status().state == "failed"


@pytest.mark.soak
def test_a_run_that_waits_for_its_driver_can_be_cancelled(detached: Launcher, cluster: Standalone) -> None:
    huge = cluster_engine(cluster.url, **{"spark.driver.memory": "64g"})
    handle = detached.options(engine=huge, run_id="waits").submit(who_is_there)
    assert handle.status().state == "pending"
    handle.cancel()
    assert handle.wait(timeout=1)
    assert handle.status().state == "cancelled"


@pytest.mark.soak
def test_a_cluster_with_a_secret_takes_the_driver_and_the_run_encrypts_as_it_does(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory, gpu_script: Path
) -> None:
    settings = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    named = {name.replace(".", "_"): value for name, value in settings.items()}
    secured = Standalone(tmp_path_factory.mktemp("secured"), gpu_script, **named, spark_authenticate_secret=SECRET)
    try:
        secured.await_master()
        for _ in range(2):
            secured.add_worker()
        secured.await_workers()
        engine = cluster_engine(secured.url, **settings, **{"spark.authenticate.secret": SECRET})
        handle = launcher.options(engine=engine, env={**(launcher.env or {}), "MY_TOKEN": SECRET}).submit(who_is_there)
        assert handle.result(timeout=WAIT)["sum"] == 2.0
    finally:
        servers.stop([secured.master, *secured.workers])
    assert "the connections of attempt 0 are encrypted" in Path(handle.own.path("driver.log")).read_text()
    assert files_with(Path(handle.directory), SECRET) == []
