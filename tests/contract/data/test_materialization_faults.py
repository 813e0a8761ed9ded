"""A Spark that computes a dataset, and what can happen to it meanwhile: nothing is lost, nothing is left behind."""

import glob
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import until
from tests.services import spark_session

import rankzero.train as rt
from rankzero import EngineError, Launcher, RunCancelledError, RunHandle, SparkEngine
from rankzero.engines.spark.materialize import materialize
from rankzero.run.retention import collect

WAIT = 120.0

STUCK = "SELECT id FROM range(0, 4, 1, 4) WHERE id = 0 OR java_method('java.lang.Thread', 'sleep', 600000L) IS NULL"
"""One of its tasks writes its rows at once, and the others sleep."""


@pytest.fixture(scope="module")
def session(default_python: None) -> Iterator[Any]:
    """A session whose Python workers Spark's own daemon starts, as those of users: nothing is imported before."""
    with spark_session("local[2]") as spark:
        yield spark


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounts need root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_a_typed_error_and_is_as_empty_as_before(session: Any, small_disk: Path) -> None:
    with pytest.raises(EngineError, match="could not compute .*the store or a local disk .*No space left on device"):
        materialize(
            session.range(800_000).selectExpr("rand(1) AS x"), str(small_disk / "rows"), "train", lambda _: None
        )
    assert os.listdir(small_disk) == []


def test_the_workers_of_sparks_own_daemon_write_every_row(session: Any, tmp_path: Path) -> None:
    assert not session.sparkContext.getConf().contains("spark.python.daemon.module")
    frame = session.range(0, 100, 1, 3).selectExpr("id", "array(id / 2, null) AS halves", "string(id) AS text")
    manifest = materialize(frame, str(tmp_path / "rows"), "train", lambda _: None)
    tables = [pq.read_table(file.location) for file in manifest.files]
    assert pa.concat_tables(tables).rename_columns(["id", "halves", "text"]).sort_by("id").to_pylist() == [
        {"id": number, "halves": [number / 2, None], "text": str(number)} for number in range(100)
    ]


def ids() -> list[int]:
    mine = [number for batch in rt.get_dataset_shard().iter_batches(10) for number in batch["id"].tolist()]
    return sorted(number for part in rt.all_gather_object(mine) for number in part)


def submitted(store: Path, query: str, master: str = "local[2]", train: Callable[[], Any] = ids) -> RunHandle[Any]:
    launcher = Launcher(2, engine=SparkEngine(master=master), dataset=query, store=store, run_id="q")
    return launcher.submit(train)


def computed(store: Path, files: str = "") -> list[str]:
    """Returns the folders of datasets that Spark computes or has computed, or files in them."""
    return glob.glob(f"{store}/q/submissions/*/datasets/*{files}")


def await_files(store: Path) -> None:
    until(lambda: computed(store, "/rankzero-part-*"), WAIT, "the first file of Spark's")


def processes_of(handle: RunHandle[Any]) -> list[psutil.Process]:
    """The driver and its JVMs, with which their Python ends. What forks zygotes belongs to the whole suite."""
    driver = psutil.Process(handle.status().driver_pid)
    return [driver, *(each for each in driver.children(recursive=True) if each.name() == "java")]


@pytest.mark.soak
def test_a_cancel_while_the_drivers_own_spark_computes_leaves_nothing(tmp_path: Path) -> None:
    handle = submitted(tmp_path, STUCK)
    await_files(tmp_path)
    processes = processes_of(handle)
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(WAIT)
    assert computed(tmp_path) == []
    assert not psutil.wait_procs(processes, 10)[1]


@pytest.mark.soak
def test_the_rows_of_a_driver_that_is_killed_are_computed_anew(tmp_path: Path) -> None:
    handle = submitted(tmp_path, STUCK)
    await_files(tmp_path)
    processes = processes_of(handle)
    processes[0].kill()
    assert not psutil.wait_procs(processes, 30)[1]
    left = computed(tmp_path)
    handle = submitted(tmp_path, "SELECT id FROM range(0, 100, 1, 3)")
    assert handle.result(WAIT) == list(range(100))
    # `rankzero gc` removes what the killed driver has left, here before the run of the other query is old enough.
    assert computed(tmp_path) == left != []
    collect(tmp_path, older_than=1.0, now=(handle.status().ended or 0.0) + 0.9)
    assert computed(tmp_path) == []


@pytest.mark.soak
def test_an_executor_that_is_killed_costs_no_row(tmp_path: Path) -> None:
    slow = "id % 100 != 0 OR java_method('java.lang.Thread', 'sleep', 2000L) != ''"
    go = str(tmp_path / "go")

    def ids_later() -> list[int]:
        while not os.path.exists(go):
            time.sleep(0.05)
        return ids()

    query = f"SELECT id FROM range(0, 800, 1, 8) WHERE {slow}"
    handle = submitted(tmp_path, query, "local-cluster[2,1,1024]", ids_later)
    await_files(tmp_path)
    executors = [each for each in processes_of(handle) if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline())]
    assert len(executors) == 2
    os.kill(executors[0].pid, signal.SIGKILL)
    until(lambda: handle.status().state == "running", 2 * WAIT, "ranks")
    # What the dead one had begun is in no manifest, and not in the folder, which goes with the success.
    files = computed(tmp_path, "/*.parquet")
    assert len({os.path.basename(file)[:20] for file in files}) == len(files) == 8
    Path(go).touch()
    expected = [number for number in range(800) if number % 100]
    assert [number for number in handle.result(2 * WAIT) if number % 100] == expected
