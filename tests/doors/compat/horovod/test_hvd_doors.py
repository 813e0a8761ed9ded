"""HorovodRunner and horovod.run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankzero import EngineError, InvalidJobError, Launcher, RunHandle, SparkEngine
from rankzero.compat.horovod import HorovodRunner, log_to_driver
from rankzero.compat.horovod import run as horovod_run


def train_hvd(model: nn.Module) -> Any:
    """The guide's function, without its data."""
    import tempfile

    import rankzero.compat.horovod.torch as hvd

    hvd.init()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(1, 6):
        log_to_driver(f"Epoch: {epoch}")
        optimizer.zero_grad()
        loss = model(torch.ones(20, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
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
    assert "model saved as" not in shown


def test_every_door_on_spark(session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    losses, _ = HorovodRunner(np=2, driver_log_verbosity="all").run(train_hvd, model=nn.Linear(4, 3))
    assert len(losses) == 5
    assert "model saved as" in capsys.readouterr().out
    assert horovod_run(lambda: os.environ["RANK"]) == ["0", "1", "2", "3"], "as many as there are slots"
    session.stop()
    for call in (lambda: HorovodRunner(np=2).run(print), lambda: horovod_run(print)):
        with pytest.raises(EngineError, match=r"no active SparkSession: .* for processes here"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HorovodRunner(np=0), "np is 0"),
        (lambda: HorovodRunner(np=1, driver_log_verbosity="none"), "driver_log_verbosity"),
        (lambda: horovod_run(len, args=(1, 2), np=2), "do not fit"),
        (lambda: horovod_run(print, np=2, hosts="a:1,b:1"), "no hosts='a:1,b:1': .*launcher="),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        call()


def local_object(base: int) -> Any:
    rank = int(os.environ["RANK"])

    class Local:
        value = base + rank

    return lambda: Local.value


def test_values_of_all_ranks_return_though_they_cannot_be_found_by_name(tmp_path: Path) -> None:
    harmless: dict[str, Any] = {"verbose": 2, "use_gloo": True, "hosts": None, "use_mpi": False, "env": {"WORD": "x"}}
    launcher = Launcher(store=tmp_path, run_id="exchange")
    values = horovod_run(func=local_object, args=(10,), np=2, launcher=launcher, **harmless)
    assert [value() for value in values] == [10, 11]
    assert RunHandle.attach(str(tmp_path / "exchange")).params == {"base": 10}, "the run is of the user's function"
