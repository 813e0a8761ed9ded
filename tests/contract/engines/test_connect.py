"""`SparkConnectEngine` on a real Spark Connect server: what a launch gives, refuses, and leaves behind."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port, until
from tests.contract.engines.connect_server import ConnectServer, connect_server
from tests.contract.engines.pickled_late import PickledLate

from rankzero import (
    EngineError,
    InsufficientSlotsError,
    InvalidJobError,
    Launcher,
    RunCancelledError,
    SparkConnectEngine,
    SparkEngine,
    TorchDistributor,
)
from rankzero.engines.connect.client import CONNECT_SESSION_WINDOW
from rankzero.job import Job

WAIT = 90.0


MESSAGE_LIMIT = 128 << 20  # Bytes that one message of Spark Connect can have


@pytest.fixture
def on_connect(launcher: Launcher, server: ConnectServer) -> Launcher:
    """Two ranks on the server."""
    return launcher.options(engine=SparkConnectEngine(server.url))


def reduce(value: float) -> list[Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((10,), value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    print(f"this is rank {dist.get_rank()}")
    return [total.sum().item(), os.environ["SPARK_JOB_ARTIFACT_UUID"], os.getppid()]


def stand_still(folder: str = "") -> None:
    if folder:
        Path(folder, f"up-{os.environ['RANK']}").touch()
    threading.Event().wait()


def size_of(data: Any) -> tuple[int, bytes]:
    return len(data), bytes(data)


# What a pipeline's task is: a process that launches once.
LAUNCH = """
import json, sys
from tests.contract.engines.test_connect import reduce
from rankzero import Launcher, SparkConnectEngine
print(json.dumps(Launcher(2, engine=SparkConnectEngine(sys.argv[1]), store=sys.argv[2]).run(reduce, 1.0)))
print("jvm" if "py4j" in sys.modules else "no jvm")
"""


def test_ranks_train_together_and_their_lines_come_back(
    on_connect: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    total, *_ = on_connect.run(reduce, 0.5)
    assert total == 15.0
    # A first start on a busy machine may say that it waits.
    lines = [line for line in capfd.readouterr().out.splitlines() if "rankzero:" not in line]
    assert sorted(lines) == ["[0] this is rank 0", "[1] this is rank 1"]


@pytest.mark.soak
def test_launches_of_fresh_processes_share_what_is_warm(
    server: ConnectServer, tmp_path: Path, suite_marker: str
) -> None:
    def launch() -> tuple[list[Any], str]:
        command = [sys.executable, "-c", LAUNCH, server.url, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        lines = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
        return json.loads(lines[-2]), lines[-1]

    window = time.time() // CONNECT_SESSION_WINDOW
    launches = [launch(), launch()]
    if time.time() // CONNECT_SESSION_WINDOW != window:
        # They may have got a session each, but not this one, too.
        launches.append(launch())
    assert {total for (total, *_), _ in launches} == {30.0}
    # By this id Spark keeps Python daemons apart, each of which would import everything anew.
    assert len({artifacts for (_, artifacts, _), _ in launches}) < len(launches)
    assert {jvm for _, jvm in launches} == {"no jvm"}


@pytest.mark.soak
def test_arguments_and_results_larger_than_a_message(on_connect: Launcher) -> None:
    data = os.urandom(1 << 20) * (MESSAGE_LIMIT // (1 << 20) + 10)
    size, back = on_connect.run(size_of, data)
    assert size == len(data)
    assert back == data


def test_agents_that_are_cancelled_before_the_server_has_their_stage_end(
    server: ConnectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.connect.session import SparkSession

    value, requested, ended = PickledLate(), threading.Event(), Future[BaseException | None]()
    interrupt = SparkSession.interruptTag

    def note(session: SparkSession, tag: str) -> list[str]:
        found = interrupt(session, tag)
        requested.set()
        return found

    monkeypatch.setattr(SparkSession, "interruptTag", note)
    engine = SparkConnectEngine(server.url).open(Job("run", "train", 1, 1, False, None, None, 60.0, {}), {})
    try:
        config = {"env": {}, "connect_timeout": 1.0, "value": value}
        group = engine.launch(1, config, ended.set_result)
        assert value.begun.wait(WAIT)
        cancelling = threading.Thread(target=group.cancel)
        cancelling.start()
        assert requested.wait(WAIT)
        value.may_end.set()
        assert "OPERATION_CANCELED" in str(ended.result(WAIT))
        cancelling.join(WAIT)
    finally:
        value.may_end.set()
        engine.close()


@pytest.mark.soak
def test_cancelling_one_run_leaves_another_user_of_the_server_alone(
    launcher: Launcher, server: ConnectServer, tmp_path: Path
) -> None:
    ann, bob = (launcher.options(engine=SparkConnectEngine(f"{server.url}/;user_id={name}")) for name in ("ann", "bob"))
    folder = tmp_path / "up"
    folder.mkdir()
    handle = ann.submit(stand_still, str(folder))
    until(lambda: len(list(folder.iterdir())) == 2, WAIT, "two ranks")
    total: list[Any] = []
    other = threading.Thread(target=lambda: total.extend(bob.run(reduce, 1.0)))
    other.start()
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)
    other.join(WAIT)
    assert total[:1] == [30.0]


def test_a_session_of_the_caller_is_used_and_left_running(launcher: Launcher, connect_session: Any) -> None:
    total, *_ = launcher.options(engine=SparkConnectEngine(session=connect_session)).run(reduce, 1.0)
    assert total == 30.0
    assert connect_session.range(3).count() == 3


def test_torch_distributor_on_an_active_connect_session(connect_session: Any, tmp_path: Path) -> None:
    assert TorchDistributor(2, local_mode=False, use_gpu=False).run(reduce, 1.0)[0] == 30.0


# -- refusals ----------------------------------------------------------------------------------


def test_dynamic_allocation_is_refused(launcher: Launcher, connect_session: Any) -> None:
    connect_session.conf.set("spark.sql.legacy.setCommandRejectsSparkCoreConfs", "false")
    connect_session.conf.set("spark.dynamicAllocation.enabled", "true")
    try:
        with pytest.raises(InvalidJobError, match="SPARK-24942"):
            launcher.options(engine=SparkConnectEngine(session=connect_session)).run(reduce, 1.0)
    finally:
        connect_session.conf.unset("spark.dynamicAllocation.enabled")


def test_a_server_that_is_not_there_is_refused_at_once(launcher: Launcher) -> None:
    url = f"sc://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"no Spark Connect server answers at {url}"):
        launcher.options(engine=SparkConnectEngine(url)).run(reduce, 1.0)


@pytest.mark.parametrize(
    "url", ["head:15002", "sc://", "sc://head:0", "sc://head:99999", "sc://head/path", "http://head", 3]
)
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidJobError, match="is no Spark Connect URL"):
        SparkConnectEngine(url)


def test_a_token_is_shown_nowhere() -> None:
    engine = SparkConnectEngine("sc://head:443/;use_ssl=true;token=geheim")
    assert "geheim" not in repr(engine)
    assert "geheim" not in str(engine.to_spec()[0])
    for url in ("head:443x/;token=", "h:99999;token=", "h:15002/?token=", "user:geheim@h/;token=", "h/path;token="):
        with pytest.raises(InvalidJobError, match=r"'sc://[a-z]+") as caught:
            SparkConnectEngine(f"sc://{url}geheim")
        assert "geheim" not in str(caught.value)


def test_sessions_of_the_other_kind_are_refused(connect_session: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"give one of Spark Connect to SparkConnectEngine\(session=...\)"):
        SparkEngine(session=connect_session)
    with pytest.raises(InvalidJobError, match=r"give a classic one to SparkEngine\(session=...\)"):
        SparkConnectEngine(session=object())  # type: ignore[arg-type]


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


@pytest.mark.soak
def test_ranks_get_cores_of_their_own_where_the_cluster_has_profiles(launcher: Launcher, tmp_path: Path) -> None:
    with connect_server(tmp_path, "local-cluster[2,2,1024]") as cluster:
        on_cluster = launcher.options(engine=SparkConnectEngine(cluster.url), cpus_per_process=2)
        assert on_cluster.run(threads) == "2"
        with pytest.raises(InsufficientSlotsError, match="needs 3 task slots at the same time"):
            on_cluster.options(num_processes=3).run(threads)
