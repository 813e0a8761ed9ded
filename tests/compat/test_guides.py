"""The guides' own code of Ray Train, on this machine and on Spark. Imports are changed, and nobody here has GPUs.

What the guides leave out is filled in: the model, the data, a loop.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Launcher
from rankzero.compat.ray_train import RunConfig, ScalingConfig, TorchConfig, TorchTrainer, session, train


@pytest.fixture(params=[True, False], ids=["here", "spark"])
def local_mode(request: pytest.FixtureRequest) -> bool:
    if not request.param:
        request.getfixturevalue("session")
    return bool(request.param)


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


# On Spark by default: the other guide of this file.
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
