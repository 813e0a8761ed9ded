"""A standalone cluster of two workers with (faked) GPUs, and local-cluster: resources as Spark gives them."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import servers
from tests.conftest import find, until
from tests.contract.engines.conftest import Standalone
from tests.services import spark_session

from rankzero import Launcher, SparkEngine, SparkSubmitEngine, StartTimeoutError

WAIT = 120.0


def gpus() -> list[Any]:
    import torch.distributed as dist

    import rankzero.train as rt

    dist.init_process_group("gloo")
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NODE_RANK", "OMP_NUM_THREADS")
    me = [os.environ[name] for name in names]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    try:
        device = str(rt.get_context().device)
    except RuntimeError as error:
        device = str(error)
    return [everyone, device, os.getcwd()]


def engine(master: str, **conf: str) -> SparkEngine:
    named = {key.replace("_", "."): value for key, value in conf.items()}
    return SparkEngine(master=master, conf={"spark.executor.memory": "1g", **named})


@pytest.mark.soak
def test_a_task_with_two_gpus_runs_two_ranks(
    launcher: Launcher,
    standalone: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a platform sets for every session does not stand in the way of a barrier."""
    (tmp_path / "spark-defaults.conf").write_text("spark.dynamicAllocation.enabled true\nspark.task.cpus 2\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    spark = engine(
        standalone,
        spark_executor_resource_gpu_amount="2",
        spark_task_resource_gpu_amount="2",
        spark_executor_cores="2",
        spark_cores_max="4",
    )
    options = {"num_processes": 4, "processes_per_task": 2, "use_gpu": True, "backend": "gloo", "engine": spark}
    named = launcher.options(**options, run_id="two-gpus")
    ranks, device, directory = named.run(gpus)
    # Of the two cores of a task each of its ranks has its share; Spark gives each all of them.
    assert ranks == [
        ["0", "0", "3,GPU-5a1b", "0", "1"],
        ["1", "1", "3,GPU-5a1b", "0", "1"],
        ["2", "0", "3,GPU-5a1b", "1", "1"],
        ["3", "1", "3,GPU-5a1b", "1", "1"],
    ]
    # Asking for a GPU that torch cannot use is an error where the device is asked for.
    assert "cannot use CUDA" in device
    assert "/work/worker" in directory, "the ranks must have run on the cluster's workers"
    assert "spark.dynamicAllocation.enabled=false, which this run needs" in capsys.readouterr().out
    run = find(named)
    assert run is not None
    assert str(run.status().engine_url).startswith("http://")


@pytest.fixture
def on_session(
    launcher: Launcher, cluster: Standalone, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Launcher]]:
    """Makes a launcher on a session of this process, so that the test may hurry what waits."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.03")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    conf = {"spark.executor.memory": "1g"}
    if os.path.exists("/proc/net/if_inet6"):
        # As Spark writes them; agents and driver shall meet there.
        conf |= {"spark.driver.host": "[::1]", "spark.driver.bindAddress": "[::1]"}
    with spark_session(cluster.url, **conf) as session:
        yield lambda **options: launcher.options(engine=SparkEngine(session=session), **options)


def await_event(launcher: Launcher, sign: str) -> None:
    """Until an event of the launcher's run has these words."""

    def look() -> bool:
        run = find(launcher)
        return bool(run) and any(sign in json.dumps(event) for event in run.events())

    until(look, WAIT, sign)


def go_on() -> list[int]:
    import rankzero.train as rt

    if checkpoint := rt.get_checkpoint():
        return [*checkpoint.load()["sizes"], rt.get_context().world_size]
    rt.report({}, checkpoint={"sizes": [rt.get_context().world_size]})
    time.sleep(WAIT)
    return []


@pytest.mark.soak
def test_an_elastic_run_goes_on_with_what_a_lost_worker_leaves(
    on_session: Callable[..., Launcher], cluster: Standalone
) -> None:
    from pyspark import SparkContext

    elastic = on_session(num_processes=(2, 6), max_restarts=1, run_id="elastic")
    while len(cluster.workers) < 3:
        cluster.add_worker()
    cluster.await_workers()
    context = SparkContext._active_spark_context
    # A worker that is there may have no executor yet, and the run would begin without it.
    until(lambda: context.defaultParallelism == 6, WAIT, "the cores of all workers")
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(elastic.run(go_on)))
    thread.start()
    await_event(elastic, '"checkpoint"')
    servers.stop([cluster.workers[-1]])
    thread.join(WAIT)
    assert values == [[6, 4]]


@pytest.mark.soak
@pytest.mark.parametrize("deploy_mode", ["client", "cluster"])
def test_a_job_is_given_cores_and_gpus_on_a_standalone_cluster(
    launcher: Launcher, standalone: str, deploy_mode: str
) -> None:
    conf = {
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.executor.cores": "1" if deploy_mode == "cluster" else "2",
        "spark.executor.resource.gpu.amount": "1",
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
    }
    asked = {"use_gpu": True, "backend": "gloo", "cpus_per_process": int(conf["spark.executor.cores"])}
    engine = (SparkSubmitEngine if deploy_mode == "cluster" else SparkEngine)(standalone, conf=conf)
    found, _, _ = launcher.options(engine=engine, **asked).submit(gpus).result(timeout=WAIT)
    assert all(visible in ("3", "GPU-5a1b") for _, _, visible, _, _ in found)
    # More than the cluster can ever give is no silent wait.
    many = launcher.options(engine=engine, **asked, num_processes=9, start_timeout=60.0, run_id="many")
    handle = many.submit(gpus)
    with pytest.raises(StartTimeoutError, match="9 task slots|did not answer"):
        handle.result(timeout=2 * WAIT)
