"""Horovod's names: what third-party code imports, and how a driver's own imports reach its ranks."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rankzero import Launcher, WorkerFailedError

IMPORTS = """
import horovod
import horovod.torch as hvd
import horovod.common.exceptions, horovod.common.process_sets, horovod.common.util, horovod.runner, horovod.spark
from horovod.common import init, size, rank, local_rank
from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set
from horovod.common.util import gloo_built, mpi_built, nccl_built
from horovod.runner import run
from horovod.spark import run as run_on_spark, run_elastic
from horovod.torch import Compression, elastic
from horovod.torch.compression import Compressor, FP16Compressor
from horovod.torch.elastic import run as elastic_run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import Average, Sum, allreduce_async_, poll, rank, size, synchronize
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from sparkdl import HorovodRunner
from sparkdl.horovod import log_to_driver
"""


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports_and_checks(spelling: str) -> str:
    lines = [line for line in IMPORTS.splitlines() if "sparkdl" not in line or spelling == "horovod"]
    imports = "\n".join(lines).replace("horovod.", f"{spelling}.").replace("import horovod\n", f"import {spelling}\n")
    checks = f"""
assert tuple(map(int, {spelling}.__version__.split(".")[:3])) >= (0, 28, 0)
from rankzero.compat.horovod import torch as ours
assert hvd is ours and TorchState is ours.elastic.TorchState and ElasticSampler is ours.elastic.ElasticSampler
assert elastic_run is ours.elastic.run and issubclass(ours.MismatchError, HorovodInternalError)
assert issubclass(Compression.fp16, Compressor) and issubclass(Compression.none, Compressor)
assert hvd.mpi_ops.Sum is Sum and hvd.compression.Compression is hvd.Compression and hvd.elastic.TorchState
assert callable(run) and callable({spelling}.run) and callable({spelling}.torch.allreduce)
"""
    return f"{imports}\n{checks}"


REFUSED = {
    "{}.tensorflow": ", which trains torch: use {}.torch",
    "{}.tensorflow.keras": "{}.tensorflow is not part of rankzero, which trains torch: use {}.torch",
    "{}.keras": ", which trains torch: use {}.torch",
    "{}.mxnet": ", which trains torch: use {}.torch",
    "{}.ray": ": use rankzero.compat.ray_train, or Launcher",
    "{}.spark.torch": ": give a training function to {}.spark.run",
    "{}.spark.common.store": ": give a training function to {}.spark.run",
    "{}.spark.task": ": the GPU of a rank is torch.device('cuda', hvd.local_rank())",
    "{}.torch.util": "{}.torch.util is not part of rankzero: see docs/migrate-horovod.md for what is",
}


def test_what_real_scripts_import_is_there_and_what_is_not_says_what_to_use() -> None:
    """A second name changes nothing of a module: its name, its spec, its file."""
    names = [(name, spelling) for spelling in ("horovod", "rankzero.compat.horovod") for name in REFUSED]
    # In one process, whose import of torch is the most of it.
    program = "from rankzero.compat.horovod import install\ninstall()\n"
    for name, spelling in names:
        program += f"try:\n    import {name.format(spelling)}\nexcept ImportError as error:\n    print(error)\n"
    program += """
import rankzero.compat.horovod.torch as ours
before = ours.__name__, ours.__spec__, ours.__file__, ours.__package__
import horovod.torch
assert horovod.torch is ours
"""
    program += imports_and_checks("horovod") + imports_and_checks("rankzero.compat.horovod")
    program += "assert before == (ours.__name__, ours.__spec__, ours.__file__, ours.__package__)\n"
    for line, (name, spelling) in zip(python(program).splitlines(), names, strict=True):
        assert REFUSED[name].format(spelling, spelling) in line


def test_ranks_without_the_variable_say_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\n")
    with pytest.raises(WorkerFailedError, match="RANKZERO_HOROVOD.* rankzero.compat.horovod"):
        Launcher(store=tmp_path / "runs").run(str(tmp_path / "train.py"))


NOTEBOOK = """
from rankzero.compat.horovod import install

install()

import horovod
import horovod.torch as hvd
from sparkdl import HorovodRunner

import helpers


def train(where):
    import horovod.torch

    import torch

    hvd.init()
    assert helpers.hvd is horovod.torch is hvd
    return where, horovod.torch.allreduce(torch.ones(1), op=hvd.Sum).item(), helpers.size()


if __name__ == "__main__":
    {session}
    print(HorovodRunner(np={np}).run(train, where="here"))
    print(horovod.run(train, args=("there",), np=2))
"""


def notebook(tmp_path: Path, np: int, session: str = "pass") -> list[str]:
    (tmp_path / "helpers.py").write_text(
        "import horovod.torch as hvd\nfrom sparkdl import HorovodRunner\n\n\ndef size():\n    return hvd.size()\n"
    )
    (tmp_path / "notebook.py").write_text(textwrap.dedent(NOTEBOOK.format(np=np, session=session)))
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "RANKZERO_STORE": str(tmp_path / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_driver_that_installs_needs_nothing_else(tmp_path: Path) -> None:
    lines = notebook(tmp_path, -2)
    assert lines[0] == "('here', 2.0, 2)"
    assert lines[-1] == "[('there', 2.0, 2), ('there', 2.0, 2)]"


@pytest.mark.soak
def test_a_driver_that_installs_needs_nothing_else_on_spark(tmp_path: Path) -> None:
    session = (
        "from pyspark.sql import SparkSession; SparkSession.builder.master('local-cluster[2,1,1024]')"
        ".config('spark.ui.enabled', 'false').getOrCreate()"
    )
    lines = notebook(tmp_path, 2, session)
    assert lines[0] == "('here', 2.0, 2)"
    assert lines[-1] == "[('there', 2.0, 2), ('there', 2.0, 2)]"
