"""HorovodRunner, horovod.run, horovod.spark, and the names that scripts and third-party code import."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankzero.compat.horovod.torch as hvd
from rankzero import EngineError, InvalidJobError, Launcher, RunHandle, SparkEngine
from rankzero.compat.horovod import HorovodRunner, log_to_driver
from rankzero.compat.horovod import run as horovod_run
from rankzero.compat.horovod import spark as horovod_spark

train_ds = torch.utils.data.TensorDataset(
    torch.randn(80, 4, generator=torch.Generator().manual_seed(1)), torch.arange(80) % 3
)


def train(model: Any, train_loader: Any, optimizer: Any) -> float:
    total = 0.0
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def train_hvd(model: Any) -> Any:
    # The guide's function; the place of its file, the number of epochs and the values are the test's.
    import tempfile

    from torch.utils.data.distributed import DistributedSampler

    import rankzero.compat.horovod.torch as hvd

    hvd.init()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    train_sampler = DistributedSampler(train_ds, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(train_ds, batch_size=20, sampler=train_sampler)
    learning_rate = 0.001 * hvd.size()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    epochs = 5
    for epoch in range(1, epochs + 1):
        log_to_driver(f"Epoch: {epoch}")
        losses.append(train(model, train_loader, optimizer))
    model_file = os.path.join(tempfile.gettempdir(), "model.pkl")
    if hvd.rank() == 0:
        torch.save(model.state_dict(), model_file)
        print("model saved as", model_file)
    return losses, model_file


def test_the_guide_shows_its_messages_and_rankzeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A negative number is this machine, whatever the launcher's engine.
    launcher = Launcher(2, store=tmp_path, engine=SparkEngine(master="spark://127.0.0.1:1"), start_timeout=30)
    losses, _ = HorovodRunner(np=-2, launcher=launcher).run(train_hvd, model=nn.Linear(4, 3))
    assert losses[-1] < losses[0]
    shown = capsys.readouterr().out
    assert "[1] Epoch: 5\n" in shown
    assert "model.pkl, which is returned, is deleted with the run" in shown, "lines of rankzero itself are shown"
    assert "model saved as" not in shown


def test_every_door_on_spark(session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    losses, _ = HorovodRunner(np=2, driver_log_verbosity="all").run(train_hvd, model=nn.Linear(4, 3))
    assert len(losses) == 5
    assert "model saved as" in capsys.readouterr().out
    assert horovod_run(lambda name: os.environ[name], args=("RANK",), num_proc=2) == ["0", "1"]
    assert horovod_spark.run(lambda: os.environ["RANK"]) == ["0", "1", "2", "3"], "as many as there are slots"
    assert horovod_spark.run_elastic(lambda: os.environ["WORLD_SIZE"], np=2) == ["2", "2"]


def test_doors_without_a_session_say_what_to_do() -> None:
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    for call, advice in (
        (lambda: HorovodRunner(np=2).run(print), "give np=-2 for processes on this machine"),
        (lambda: horovod_run(print), "give num_proc for processes on this machine"),
        (lambda: horovod_spark.run(print, num_proc=2), "give launcher="),
        (lambda: horovod_spark.run_elastic(print, num_proc=2), "give launcher="),
    ):
        with pytest.raises(EngineError, match=f"needs an active SparkSession: .*{advice}"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HorovodRunner(np=0), "np is 0"),
        (lambda: HorovodRunner(np="2"), "np is '2'"),
        (lambda: HorovodRunner(np=1, driver_log_verbosity="none"), "driver_log_verbosity"),
        (lambda: horovod_run("train.py", np=2), "fn is 'train.py'; give a function"),
        (lambda: horovod_run(len, args=(1, 2), np=2), "do not fit"),
        (lambda: horovod_run(print, np=2, start_timeout="soon"), "start_timeout is 'soon'"),
        (lambda: horovod_run(print, num_proc=0), "num_processes is 0"),
        (lambda: horovod_run(print, num_proc=2, nump_proc=4), "nump_proc=4 is not supported"),
        (lambda: horovod_run(print, num_proc=2, np=4), "np=4 is not supported"),
        (lambda: horovod_run(print, np=2, hosts="a:1,b:1"), "hosts='a:1,b:1' is not supported: .*launcher="),
        (lambda: horovod_spark.run(print, launcher=Launcher(), nic="eth0"), "nic='eth0'"),
        (lambda: horovod_spark.run_elastic(print, num_proc=2, launcher=Launcher(), np=4), "np=4 is not supported"),
        (lambda: log_to_driver(3), "takes a text"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((InvalidJobError, TypeError), match=message):
        call()


def local_object(base: int) -> Any:
    rank = int(os.environ["RANK"])

    class Local:
        value = base + rank

    return lambda: Local.value


def test_values_of_all_ranks_return_though_they_cannot_be_found_by_name(tmp_path: Path) -> None:
    harmless: dict[str, Any] = {"verbose": 2, "use_gloo": True, "hosts": None, "use_mpi": False, "disable_cache": None}
    launcher = Launcher(store=tmp_path, run_id="exchange")
    values = horovod_run(func=local_object, args=(10,), np=2, launcher=launcher, **harmless)
    assert [value() for value in values] == [10, 11]
    assert RunHandle.attach(str(tmp_path / "exchange")).params == {"base": 10}, "the run is of the user's function"
    assert horovod_run(max, args=(1, 2), hosts="localhost:2") == [2, 2]


def one_failure() -> Any:
    import rankzero.compat.horovod.torch as hvd
    import rankzero.train as rt

    hvd.init()
    if rt.get_context().attempt == 0 and hvd.rank() == 0:
        os.kill(os.getpid(), 9)
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), rt.get_context().attempt, os.environ["WORD"]


def test_run_elastic_goes_on_after_a_failure(tmp_path: Path) -> None:
    values = horovod_spark.run_elastic(
        one_failure, num_proc=2, min_np=1, reset_limit=1, env={"WORD": "here"}, launcher=Launcher(store=tmp_path)
    )
    assert values == [(float(len(values)), 1, "here")] * len(values), "as many as there is place for"


# -- names

IMPORTS = """
import horovod
import horovod.torch as hvd
import horovod.common.exceptions, horovod.common.process_sets, horovod.common.util, horovod.runner, horovod.spark
from horovod.common import init, size, rank, local_rank
from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
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

assert tuple(map(int, horovod.__version__.split(".")[:3])) >= (0, 28, 0)
from rankzero.compat.horovod import torch as ours
assert hvd is ours and TorchState is ours.elastic.TorchState and ElasticSampler is ours.elastic.ElasticSampler
assert elastic_run is ours.elastic.run and issubclass(ours.MismatchError, HorovodInternalError)
assert issubclass(Compression.fp16, Compressor) and issubclass(Compression.none, Compressor)
assert hvd.mpi_ops.Sum is Sum and hvd.compression.Compression is hvd.Compression and hvd.elastic.TorchState
assert callable(run) and callable(horovod.run) and callable(horovod.torch.allreduce)
for name in ("tensorflow.keras", "ray", "spark.torch", "torch.util"):
    try:
        __import__(f"horovod.{name}")
    except ImportError as error:
        assert "docs/migrate.md" in str(error) or "is not a package" in str(error), error
    else:
        assert False, name
"""
"""What scripts and third-party code import from Horovod."""

SCRIPT = f"""{IMPORTS}
import os
from sparkdl import HorovodRunner
from sparkdl.horovod import log_to_driver
import rankzero.train as rt, torch

hvd.init()
total = hvd.allreduce(torch.ones(1), op=Sum).item()
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
if hvd.rank() == 0:
    rt.set_result([total, HorovodRunner.__module__, *(os.environ[f"HOROVOD_{{name}}"] for name in names)])
"""


def test_a_rank_finds_horovods_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    launcher = Launcher(2, store=tmp_path / "runs", env={"RANKZERO_HOROVOD": "1"}, working_dir=tmp_path)
    assert launcher.run("train.py") == [2.0, "rankzero.compat.horovod.runner", "0", "2", "0", "2", "0", "1"]


OWN_IMPORTS = re.sub(r"(?<![-.\w])horovod\b", "rankzero.compat.horovod", IMPORTS)

DRIVER = f"""
from rankzero.compat.horovod import install
import rankzero.compat.horovod.torch as ours
before = ours.__name__, ours.__spec__, ours.__file__, ours.__package__
{OWN_IMPORTS}
install()
{IMPORTS}
assert before == (ours.__name__, ours.__spec__, ours.__file__, ours.__package__), "a second name changes nothing"
from sparkdl import HorovodRunner
import helpers


def train(where):
    import horovod.torch

    import torch

    hvd.init()
    assert helpers.hvd is horovod.torch is hvd
    return where, horovod.torch.allreduce(torch.ones(1), op=hvd.Sum).item(), helpers.size()


if __name__ == "__main__":
    np = -2
    print(HorovodRunner(np=np).run(train, where="here"))
    print(horovod.run(train, args=("there",), np=2))
"""

SPARK = """    from pyspark.sql import SparkSession
    np, conf = 2, {"spark.ui.enabled": "false"}
    SparkSession.builder.master("local-cluster[2,1,1024]").config(map=conf).getOrCreate()
"""


@pytest.mark.parametrize("on_spark", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_driver_that_installs_needs_nothing_else(tmp_path: Path, on_spark: bool) -> None:
    (tmp_path / "helpers.py").write_text(
        "import horovod.torch as hvd\nfrom sparkdl import HorovodRunner\n\n\ndef size():\n    return hvd.size()\n"
    )
    (tmp_path / "notebook.py").write_text(DRIVER.replace("    np = -2\n", SPARK if on_spark else "    np = -2\n"))
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "RANKZERO_STORE": str(tmp_path / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "('here', 2.0, 2)"
    assert lines[-1] == "[('there', 2.0, 2), ('there', 2.0, 2)]"


HOROVODS = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
    alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
    broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
    global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
    size sparse_allreduce_async start_timeline stop_timeline synchronize
"""
"""What ``horovod.torch`` 0.28.1 exports."""


def test_every_name_of_horovod_is_there() -> None:
    assert set(HOROVODS.split()) - set(hvd.__all__) == set()
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
