"""What a launch costs, in things that can be counted: processes, imports of torch, sleeps, bytes in Spark's closure.

Seconds are in `benchmarks/`; here is what must not come back unnoticed.
"""

import contextlib
import os
import sys
import time
from typing import Any

import psutil
import pytest
from tests.services import spark_session

from rankzero import Launcher, SparkEngine
from rankzero.engines.spark.context import known
from rankzero.engines.spark.stage import make_task
from rankzero.task.zygote import PRELOADED_LATER

pytestmark = pytest.mark.usefixtures("own_zygotes")


TASK_BYTES = 10_000  # The code of rankzero, nearly 200 kB, does not go with the tasks of every launch


def where_from() -> list[int]:
    """This rank's process and the two that it comes from."""
    chain = [os.getpid()]
    for _ in range(2):
        with open(f"/proc/{chain[-1]}/stat") as file:
            chain.append(int(file.read().rpartition(")")[2].split()[1]))
    return chain


def test_what_the_first_optimizer_step_imports_is_loaded_in_a_pause(launcher: Launcher) -> None:
    def loaded(names: list[str]) -> list[str]:

        return [name for name in names if name in sys.modules]

    names = list(PRELOADED_LATER)
    deadline = time.monotonic() + 60
    while launcher.run(loaded, names) != names:
        assert time.monotonic() < deadline
        time.sleep(1.0)


@pytest.fixture(scope="module")
def spark(default_python: None) -> Any:
    with spark_session("local[2]") as session:
        yield session


def test_launches_on_spark_share_python_workers_and_their_zygotes(launcher: Launcher, spark: Any) -> None:
    on_spark = launcher.options(engine=SparkEngine(session=spark))

    def python_workers() -> set[int]:
        found = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "pyspark.daemon" in process.cmdline():
                    found.add(process.pid)
        return found

    used = {on_spark.run(where_from)[2]}
    workers = python_workers()
    assert len(workers) > 1
    for _ in range(3):
        used.add(on_spark.run(where_from)[2])
    # One for each task slot.
    assert len(used) <= 2
    # An input that is not drained, or a task that fails, costs Spark its worker each time.
    assert python_workers() == workers


def test_the_code_goes_to_the_executors_once(launcher: Launcher, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = spark.sparkContext.broadcast
    monkeypatch.setattr(spark.sparkContext, "broadcast", lambda value: made.append(len(value)) or real(value))
    vars(spark.sparkContext).pop("_rankzero", None)
    for _ in range(2):
        launcher.options(engine=SparkEngine(session=spark)).run(len, [])
    assert len(made) == 1
    # Somebody has cleaned the temporary directory.
    os.unlink(known(spark.sparkContext).code()._path)
    launcher.options(engine=SparkEngine(session=spark)).run(len, [])
    assert len(made) == 2


def test_what_spark_sends_with_a_task_does_not_depend_on_the_arguments(launcher: Launcher, spark: Any) -> None:
    from pyspark import cloudpickle

    sizes = []
    for argument in (b"", bytes(3_000_000)):
        seen: list[int] = []

        def measured(*args: Any, into: list[int] = seen) -> Any:
            task = make_task(*args)
            into.append(len(cloudpickle.dumps(task)))
            return task

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rankzero.engines.spark.engine.make_task", measured)
            assert launcher.options(engine=SparkEngine(session=spark)).run(len, argument) == len(argument)
        sizes += seen
    small, large = sizes
    assert abs(large - small) < 1000
    assert large < TASK_BYTES
