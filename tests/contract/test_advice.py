"""Errors of other software come with advice: one table of texts, for ranks, their processes and engines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rankzero import Launcher, WorkerFailedError, errors

TEXTS = [
    ("ModuleNotFoundError: No module named 'horovod'", "rankzero.compat.horovod"),
    ("ModuleNotFoundError: No module named 'sparkdl.horovod'", "rankzero.compat.horovod"),
    ("ModuleNotFoundError: No module named 'acme.models'", f"It is not installed for {sys.executable} on "),
    ("ModuleNotFoundError: No module named 'acme.models'", "Write `import acme.models`"),
    (
        "worker.py\n  import pyarrow as pa\nModuleNotFoundError: No module named 'pyarrow'\n",
        "executors have no pyarrow",
    ),
    ("[PACKAGE_NOT_INSTALLED] PyArrow >= 11.0.0 must be installed; however, it was not found.", "have no pyarrow"),
    (
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark "
        "cannot run with different minor versions.",
        "set spark.pyspark.python to a Python of the driver's minor version",
    ),
    ('java.io.IOException: Cannot run program "/x/python": error=2', "no Python at '/x/python'"),
    (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
        "\nRuntimeError: unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)",
        "/dev/shm of the host is full",
    ),
    ("OSError: [Errno 28] No space left on device: '/tmp/x'", "TMPDIR"),
    ("OSError: [Errno 122] Disk quota exceeded", "TMPDIR"),
    ("killed by SIGKILL", "out-of-memory"),
    ("killed by SIGABRT", "NCCL timeout"),
    ("killed by SIGSEGV", "native code"),
    ("killed by SIGBUS", "/dev/shm"),
    ("killed by SIGTERM", "asked it to end"),
]


@pytest.mark.parametrize(("text", "words"), TEXTS)
def test_a_known_text_has_its_advice(text: str, words: str) -> None:
    found = errors.known(text)
    assert found
    assert found[0] in text
    assert words in found[1]
    assert not found[1].endswith(".")


def test_every_row_of_the_table_is_the_first_for_some_text() -> None:
    found = {next(pattern for pattern, _ in errors.KNOWN_TEXTS if re.search(pattern, text)) for text, _ in TEXTS}
    assert found == {pattern for pattern, _ in errors.KNOWN_TEXTS}


def test_a_text_that_is_not_known_is_unchanged() -> None:
    assert errors.advised("ValueError: no more batches.") == "ValueError: no more batches."


FULL = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def train():
    raise OSError(28, "No space left on device")
train()
"""


@pytest.mark.parametrize("is_command", [False, True])
def test_the_error_of_a_rank_or_a_command_ends_with_the_advice(is_command: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FULL)
    with pytest.raises(WorkerFailedError, match=r"No space left on device\. The store or a local disk .* is full"):
        Launcher(1, store=tmp_path / "runs").run([sys.executable, str(script)] if is_command else script)
