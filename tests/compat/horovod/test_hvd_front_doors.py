"""HorovodRunner, horovod.spark.run, elastic states, and names that third-party code imports."""

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankzero import EngineError, InvalidJobError, Launcher, RunHandle, SparkEngine
from rankzero.compat.horovod import HorovodRunner, log_to_driver
from rankzero.compat.horovod import run as horovod_run
from rankzero.compat.horovod import spark as horovod_spark

train_ds = torch.utils.data.TensorDataset(
    torch.randn(80, 4, generator=torch.Generator().manual_seed(1)), torch.arange(80) % 3
)


class MyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def train(model: Any, train_loader: Any, optimizer: Any) -> float:
    total = 0.0
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def train_hvd(model: Any, model_file: str) -> list[float]:
    # The guide's function; where it saves its file, and that it returns its losses, are the test's.
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
    epochs = 50
    for epoch in range(1, epochs + 1):
        log_to_driver(f"Epoch: {epoch}")
        losses.append(train(model, train_loader, optimizer))
    if hvd.rank() == 0:
        torch.save(model.state_dict(), model_file)
        print("model saved as", model_file)
    return losses


def train_ddp(model: Any) -> list[float]:
    from torch.utils.data.distributed import DistributedSampler

    import rankzero.train as rt

    sampler = DistributedSampler(train_ds)  # type: ignore[var-annotated]
    loader = torch.utils.data.DataLoader(train_ds, batch_size=20, sampler=sampler)
    model = rt.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    return [train(model, loader, optimizer) for _ in range(50)]


def test_a_negative_number_of_ranks_is_this_machine_whatever_the_engine(tmp_path: Path) -> None:
    nowhere = Launcher(engine=SparkEngine(master="spark://127.0.0.1:1"), store=tmp_path, start_timeout=30)
    assert HorovodRunner(np=-1, launcher=nowhere).run(dict, lr=0.5) == {"lr": 0.5}


def test_the_guide_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher(2, store=tmp_path)
    torch.manual_seed(0)
    hvd_model = MyNet()
    hr = HorovodRunner(np=-2, launcher=launcher)
    losses = hr.run(train_hvd, model=hvd_model, model_file=str(tmp_path / "model.pkl"))
    assert sorted(torch.load(tmp_path / "model.pkl")) == ["layer.bias", "layer.weight"]
    shown = capsys.readouterr().out
    assert "[1] Epoch: 50\n" in shown
    assert "model saved as" not in shown, "only what is given to log_to_driver"

    def ddp(model: Any) -> Any:
        import rankzero.train as rt

        rt.ensure_process_group()
        return train_ddp(model)

    assert losses == pytest.approx(launcher.run(ddp, hvd_model), abs=1e-5)


def test_lines_of_rankzero_are_shown_with_every_verbosity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        print("a line of the user")
        time.sleep(7 * hvd.rank())
        hvd.allreduce(torch.ones(2), name="gradient")

    launcher = Launcher(2, store=tmp_path, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
    HorovodRunner(np=-2, launcher=launcher).run(train)
    shown = capsys.readouterr().out
    assert "[0] rankzero: rank 0 has waited" in shown
    assert "a line of the user" not in shown


def test_the_guide_on_spark(session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hr = HorovodRunner(np=2, driver_log_verbosity="all")
    assert len(hr.run(train_hvd, model=MyNet(), model_file=str(tmp_path / "model.pkl"))) == 50
    assert "model saved as" in capsys.readouterr().out
    ranks = horovod_run(lambda base: base + __import__("os").environ["RANK"], args=("rank ",), num_proc=2)
    assert ranks == ["rank 0", "rank 1"]
    assert horovod_spark.run_elastic(lambda: __import__("os").environ["WORLD_SIZE"], num_proc=2) == ["2", "2"]


def test_scripts_that_import_horovod(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import horovod.torch as hvd
            from horovod.torch.mpi_ops import Sum
            from sparkdl import HorovodRunner
            import rankzero.train as rt, torch

            hvd.init()
            try:
                import horovod.tensorflow
            except ImportError as error:
                refused = str(error)
            rt.set_result([hvd.allreduce(torch.ones(1), op=Sum).item(), HorovodRunner.__module__, refused])
            """
        )
    )
    launcher = Launcher(2, store=tmp_path, env={"RANKZERO_HOROVOD": "1"})
    total, module, refused = launcher.run(str(tmp_path / "train.py"))
    assert (total, module) == (2.0, "rankzero.compat.horovod.runner")
    assert refused == "horovod.tensorflow is not part of rankzero, which trains torch: use horovod.torch"


CHILD = """
import os, sys
import horovod.torch as hvd
from horovod.common.util import env
from sparkdl import HorovodRunner
with env(LATER="1", HOME=None):
    inside = os.environ["LATER"], "HOME" in os.environ
of = " ".join(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"))
print(of, hvd.__name__, HorovodRunner.__module__, inside, "HOME" in os.environ, bool(os.environ["HOROVOD_HOSTNAME"]))
"""


def test_programs_that_a_rank_starts_find_horovod_and_its_variables(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)

    def train(script: str, environment: dict[str, str]) -> str:
        import os
        import subprocess

        if os.environ["RANK"] != "0":
            return ""
        command, env = ["sh", "-c", f"python3 {script}"], {**os.environ, **environment}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    # The interpreter of the ranks is the first on the path, as in an activated environment. In the environment of the
    # launcher both variables would start a warm server.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    launcher = Launcher(2, store=tmp_path, env={"RANKZERO_HOROVOD": "1"})
    said = launcher.run(train, str(tmp_path / "child.py"), {"PATH": path, "HOME": str(tmp_path)})
    names = "rankzero.compat.horovod.torch rankzero.compat.horovod.runner"
    assert said == f"0 2 0 2 0 {names} ('1', False) True True\n"


def test_hosts_that_are_this_machine_are_its_slots() -> None:
    assert horovod_run(max, args=(1, 2), hosts="localhost:2") == [2, 2]
    with pytest.raises(InvalidJobError, match="hosts='a:2,b:2' is not supported"):
        horovod_run(max, args=(1, 2), np=4, hosts="a:2,b:2")


def test_an_elastic_state_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    def main() -> Any:
        import os
        import time

        import rankzero.compat.horovod.torch as hvd
        import rankzero.train as rt

        hvd.init()
        model = nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(state.epoch)])

        @hvd.elastic.run
        def loop(state: Any) -> Any:
            first = state.epoch
            for epoch in range(state.epoch, 4):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if epoch == 2 and rt.get_context().attempt == 0:
                    while hvd.rank() == 0 and rt.get_checkpoint() is None:
                        time.sleep(0.01)
                    hvd.barrier()
                    os.kill(os.getpid(), 9)
                if epoch == 1:
                    sampler.record_batch(0, 2)
                    state.epoch = epoch + 1
                    state.commit()
            return first, resets, sorted(state.sampler.processed_indices), model.weight.item()

        with torch.no_grad():
            model.weight.fill_(1.0)
        return loop(state)

    first, resets, processed, weight = Launcher(2, store=tmp_path, max_restarts=1).run(main)
    assert (first, resets) == (2, [2])
    assert processed == [0, 1, 2, 3], "what all ranks had recorded when they committed"
    assert weight == pytest.approx(0.6), "no step is lost, none counts twice"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HorovodRunner(np=0), InvalidJobError, "np is 0"),
        (lambda: HorovodRunner(np="2"), InvalidJobError, "np is '2'"),
        (lambda: HorovodRunner(np=1, driver_log_verbosity="none"), InvalidJobError, "driver_log_verbosity"),
        (lambda: horovod_run(print, num_proc=2, use_mpi=True), InvalidJobError, "use_mpi"),
        (lambda: horovod_run(print, num_proc=2, nump_proc=4), InvalidJobError, "no option 'nump_proc'"),
        (lambda: horovod_run(print, num_proc=2, np=4), InvalidJobError, "np=4 .* is num_proc"),
        (lambda: horovod_run(print, np=2, hosts="a:1,b:1"), InvalidJobError, "hosts='a:1,b:1' .* engine"),
        (lambda: horovod_run(print, np=2, min_num_proc=1), InvalidJobError, "min_num_proc=1 .*run_elastic"),
        (lambda: horovod_run(print, np=2, executable="python2"), InvalidJobError, "executable"),
        (lambda: horovod_run("train.py", np=2), InvalidJobError, "fn is 'train.py'; give a function"),
        (lambda: horovod_run(len, args=(1, 2), np=2), InvalidJobError, "do not fit"),
        (lambda: horovod_run(print, args=0.1, np=2), InvalidJobError, r"args is 0.1; give a tuple, such as \(0.1,\)"),
        (lambda: horovod_run(print, kwargs=["lr"], np=2), InvalidJobError, "kwargs is \\['lr'\\]"),
        (lambda: horovod_run(print, np=2, start_timeout="soon"), InvalidJobError, "start_timeout is 'soon'"),
        (lambda: horovod_run(print, num_proc=0), InvalidJobError, "num_processes is 0"),
        (lambda: horovod_spark.run(print, launcher=Launcher(), nic="eth0"), InvalidJobError, "no option 'nic'"),
        (lambda: horovod_spark.run_elastic(print, launcher=Launcher(), slots=2), InvalidJobError, "slots=2"),
        (
            lambda: horovod_spark.run_elastic(print, 2, launcher=Launcher(), np=2),
            InvalidJobError,
            "np=2 .* is num_proc",
        ),
        (lambda: log_to_driver(3), TypeError, "takes a text"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_on_spark_without_a_session_says_what_to_do() -> None:
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    with pytest.raises(EngineError, match="np=-2 for processes on this machine"):
        HorovodRunner(np=2).run(print)
    for call in (
        lambda: horovod_run(print),
        lambda: horovod_spark.run(print, num_proc=2),
        lambda: horovod_spark.run_elastic(print, num_proc=2),
    ):
        with pytest.raises(EngineError, match="horovod.* needs an active SparkSession"):
            call()


def exchange(base: int) -> Any:
    import rankzero.compat.horovod.torch as hvd

    hvd.init()

    class Local:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    add = hvd.broadcast_object((lambda x: x + base) if hvd.rank() == 0 else None, root_rank=0)
    ranks = [each.rank for each in hvd.allgather_object(Local(hvd.rank()))]
    hvd.shutdown()
    return lambda: (add(1), ranks)


def test_objects_that_cannot_be_found_by_name_travel(tmp_path: Path) -> None:
    harmless: dict[str, Any] = {"verbose": 2, "use_gloo": True, "hosts": None, "use_mpi": False, "disable_cache": None}
    launcher = Launcher(store=tmp_path, run_id="exchange")
    values = horovod_run(func=exchange, args=(10,), np=2, launcher=launcher, **harmless)
    assert [value() for value in values] == [(11, [0, 1])] * 2
    assert RunHandle.attach(str(tmp_path / "exchange")).params == {"base": 10}, "the run is of the user's function"


def one_failure() -> Any:
    import os

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
