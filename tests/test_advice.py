"""Errors of other software come with advice: one table of texts, for ranks, their processes and engines."""

from __future__ import annotations

import multiprocessing
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankzero import EngineError, InvalidJobError, Launcher, SparkEngine, WorkerFailedError, advice
from rankzero.engines.spark.errors import explain

TEXTS = [
    ("ModuleNotFoundError: No module named 'horovod'", "rankzero.compat.horovod"),
    ("ModuleNotFoundError: No module named 'sparkdl.horovod'", "rankzero.compat.horovod"),
    ("ModuleNotFoundError: No module named 'acme.models'", f"It is not installed for {sys.executable} on "),
    ("ModuleNotFoundError: No module named 'acme.models'", "Write `import acme.models`"),
    ("ImportError: attempted relative import with no known parent package", "-m package.module"),
    (
        "worker.py\n  import pyarrow as pa\nModuleNotFoundError: No module named 'pyarrow'\n",
        "executors have no pyarrow",
    ),
    ("[PACKAGE_NOT_INSTALLED] PyArrow >= 11.0.0 must be installed; however, it was not found.", "have no pyarrow"),
    (
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark "
        "cannot run with different minor versions.",
        "set spark.pyspark.python to a Python of the driver's version",
    ),
    ('java.io.IOException: Cannot run program "/x/python": error=2', "no Python at '/x/python'"),
    (
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        "init_process_group() first",
    ),
    (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
        "\nRuntimeError: unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
        "/dev/shm of the host is full",
    ),
    ("OSError: [Errno 28] No space left on device: '/tmp/x'", "no room on a local disk"),
    ("OSError: [Errno 122] Disk quota exceeded", "no room on a local disk"),
    ("KeyError: 'getpwuid(): uid not found: 54321'", 'env={"USER": "trainer"'),
    ("OSError: No username set in the environment", 'env={"USER": "trainer"'),
    (
        'Exception in thread "main" java.lang.IllegalArgumentException: basedir must be absolute: ?/.ivy2.5.2/local',
        "set spark.jars.ivy",
    ),
    ("AssertionError: daemonic processes are not allowed to have children", "num_workers=0"),
    (
        "sqlalchemy.exc.ArgumentError: Could not parse SQLAlchemy URL from given URL string",
        "as an argument, such as {{ var.value.x }}",
    ),
    ("killed by SIGKILL", "out-of-memory"),
    ("killed by SIGABRT", "NCCL timeout"),
    ("killed by SIGSEGV", "native code"),
    ("killed by SIGBUS", "/dev/shm"),
    ("killed by SIGTERM", "asked it to end"),
]


@pytest.mark.parametrize(("text", "words"), TEXTS)
def test_a_known_text_has_its_advice(text: str, words: str) -> None:
    found = advice.known(text)
    assert found
    assert words in found.advice
    assert found.line in text
    assert not found.advice.endswith(".")


def test_every_row_of_the_table_is_the_first_for_some_text() -> None:
    found = {next(pattern for pattern, _ in advice.TABLE if advice.re.search(pattern, text)) for text, _ in TEXTS}
    assert found == {pattern for pattern, _ in advice.TABLE}


def test_a_text_that_is_not_known_is_unchanged() -> None:
    assert advice.advised("ValueError: no more batches.") == "ValueError: no more batches."


def without_a_group() -> None:
    import torch.distributed as dist

    dist.barrier()


def unknown_user() -> None:
    pwd.getpwuid(54321)


def from_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(in_a_pool)


def in_a_pool() -> None:
    multiprocessing.get_context("fork").Process(target=int).start()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (without_a_group, r"init_process_group\. Call torch\.distributed\.init_process_group\(\) first"),
        (unknown_user, r"uid not found: 54321'\. The user id of the process has no name: give the ranks env="),
        (from_a_pool, r"daemonic processes are not allowed to have children\. A process of multiprocessing\.Pool"),
    ],
)
def test_the_error_of_a_rank_ends_with_the_advice(train: Callable[[], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=words):
        Launcher(1, store=tmp_path).run(train)


RECORDED = """
import pwd
from torch.distributed.elastic.multiprocessing.errors import record
record(pwd.getpwuid)(54321)
"""


def test_the_error_of_a_command_ends_with_the_advice(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECORDED)
    with pytest.raises(WorkerFailedError, match="The user id of the process has no name"):
        Launcher(1, store=tmp_path / "runs").run([sys.executable, str(script)])


def test_the_error_of_an_engine_begins_with_the_advice() -> None:
    error = explain('at x\njava.io.IOException: Cannot run program "/x/python": error=2\n\tat java.lang.Thread')
    assert isinstance(error, EngineError)
    line = 'java.io.IOException: Cannot run program "/x/python": error=2'
    to_do = "the executors have no Python at '/x/python': set spark.pyspark.python to one they have"
    assert str(error) == f"the Spark job failed: {to_do} ({line})"


def test_a_jvm_whose_user_has_no_home(tmp_path: Path) -> None:
    """As for a user id without an entry in /etc/passwd, whose home is ``?`` in Java."""
    engine = SparkEngine("local[1]", {"spark.jars.packages": "a:b:1", "spark.jars.ivy": "?/.ivy2"})
    with pytest.raises(EngineError, match=r"basedir must be absolute[\s\S]*set spark\.jars\.ivy to the absolute path"):
        Launcher(1, engine=engine, store=tmp_path).run(int)


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    with pytest.raises(InvalidJobError, match="^it needs no_such and nor_this here: pip install 'x>=1'$"):
        advice.require("it needs", "'x>=1'", "no_such", "sys", "nor_this")
