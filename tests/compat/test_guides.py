"""The guides' own code, on this machine and on Spark. Imports are changed, and nobody here has GPUs.

What the guides leave out is filled in: the model, the data, a loop; typing errors in them are mended.
"""

import os
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Launcher, TorchDistributor
from rankzero.compat.ray_train import RunConfig, ScalingConfig, TorchConfig, TorchTrainer, session, train


@pytest.fixture(params=[True, False], ids=["here", "spark"])
def local_mode(request: pytest.FixtureRequest) -> bool:
    if not request.param:
        request.getfixturevalue("session")
    return bool(request.param)


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super(SimpleModel, self).__init__()  # noqa: UP008
        self.fc = nn.Linear(10, 1)

    def forward(self, x: Any) -> Any:
        return self.fc(x)


def train_model(dataloader: Any) -> Any:
    import torch
    import torch.nn as nn
    from torch.optim import SGD

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SimpleModel().to(device)
    optimizer = SGD(model.parameters(), lr=0.01)
    loss_fn = nn.MSELoss()

    for _epoch in range(10):
        for batch in dataloader:
            inputs, targets = batch
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            loss.backward()
            optimizer.step()
    # The guide evaluates the model afterwards.
    return model


def test_a_model_and_a_data_loader(local_mode: bool) -> None:
    inputs = torch.randn(100, 10)
    targets = torch.randn(100, 1)
    dataloader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=10)
    with pytest.warns(DeprecationWarning, match="num_workers is called num_processes"):
        distributor = TorchDistributor(num_workers=2, local_mode=local_mode, use_gpu=False)
    model = distributor.run(train_model, dataloader)
    assert isinstance(model, SimpleModel), "the caller gets its own class back"
    model.eval()
    with torch.no_grad():
        for inputs, _targets in dataloader:
            assert model(inputs).shape == (10, 1)


def test_a_function_that_makes_its_own_group(local_mode: bool) -> None:
    def train(learning_rate: float, use_gpu: bool) -> Any:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler

        backend = "nccl" if use_gpu else "gloo"
        dist.init_process_group(backend)
        device = int(os.environ["LOCAL_RANK"]) if use_gpu else "cpu"
        model = DDP(torch.nn.Linear(10, 1).to(device))
        dataset = TensorDataset(torch.randn(16, 10))
        sampler: Any = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler)

        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        seen = 0
        for [x] in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen += 1
        dist.destroy_process_group()
        return seen

    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    assert distributor.run(train, 1e-3, False) == 8


TRAIN_FILE = """
    import argparse
    import torch, torch.distributed as dist
    import rankzero.train as rt

    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", "--learning-rate", type=float)
    parser.add_argument("--batch_size", "--batch-size", type=int)
    parser.add_argument("--my-key", default="")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.tensor(arguments.learning_rate * arguments.batch_size)
    dist.all_reduce(total)
    rt.set_result([round(total.item(), 6), arguments.my_key])
"""


def test_a_training_file_of_a_repository(local_mode: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN_FILE))
    train_file = str(tmp_path / "train.py")
    args = ["--learning_rate=0.001", "--batch_size=16"]
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    assert distributor.run(train_file, *args) == [0.032, ""]


def test_a_script_by_its_name_and_a_function_that_prints(
    local_mode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN_FILE))
    monkeypatch.chdir(tmp_path)
    distributor = TorchDistributor(num_processes=1, local_mode=local_mode, use_gpu=False)
    line = ["--learning-rate=1e-3", "--batch-size=64", "--my-key=my-value"]
    assert distributor.run("train.py", *line) == [0.064, "my-value"]

    def train(a: str, b: str, c: str) -> str:
        print(f"Got a={a}, b={b}, c={c}")
        return "success"

    assert distributor.run(train, *line) == "success"
    assert "Got a=--learning-rate=1e-3, b=--batch-size=64, c=--my-key=my-value" in capsys.readouterr().out


class NeuralNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def train_func() -> Any:
    model = NeuralNetwork()
    model = train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker_batch_size = 4
    my_dataset = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    data_loader = DataLoader(my_dataset, batch_size=worker_batch_size)
    data_loader = train.torch.prepare_data_loader(data_loader)
    for X, y in data_loader:
        loss = nn.functional.mse_loss(model(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    global_batch_size = worker_batch_size * session.get_world_size()
    session.report({"loss": loss.item(), "global_batch_size": global_batch_size, "batches": len(data_loader)})
    return model.module.state_dict()


# On Spark by default: the other guides of this file.
@pytest.mark.parametrize("local_mode", [True, pytest.param(False, marks=pytest.mark.soak)], indirect=True)
def test_a_converted_loop_of_ray_train(local_mode: bool, tmp_path: Path) -> None:
    # Without a launcher it is the active SparkSession.
    launcher = Launcher() if local_mode else None
    # Ray writes into the home directory, and so would this.
    place = RunConfig(storage_path=tmp_path)
    use_gpu = False
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(use_gpu=use_gpu, num_workers=2), run_config=place)
    result = trainer.fit()
    assert result.metrics is not None
    assert (result.metrics["global_batch_size"], result.metrics["batches"]) == (8, 3)
    assert list(result.return_value) == list(NeuralNetwork().state_dict()), "tensors are allowed"
    assert result.metrics_dataframe["loss"].tolist() == [result.metrics["loss"]]
    assert (result.error, result.checkpoint) == (None, None)

    trainer = TorchTrainer(
        train_func,
        torch_backend=TorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=place,
        launcher=launcher,
    )
    assert trainer.fit().metrics is not None


def get_started() -> None:
    import rankzero.compat.ray_train as ray

    model = ray.train.torch.prepare_model(NeuralNetwork())
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    train_loader: Any = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=4, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(train_loader)
    for epoch in range(2):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(temp_checkpoint_dir))
        if ray.train.get_context().get_world_rank() == 0:
            print(metrics)


def test_rays_page_for_pytorch(local_mode: bool, tmp_path: Path) -> None:
    import rankzero.compat.ray_train as ray

    trainer = ray.train.torch.TorchTrainer(
        get_started,
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert (result.metrics["epoch"], result.error, len(result.best_checkpoints)) == (1, None, 2)
    with result.checkpoint.as_directory() as checkpoint_dir:
        NeuralNetwork().load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pt")))
