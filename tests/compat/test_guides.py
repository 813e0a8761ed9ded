"""The guides' own code of Ray Train, on this machine and on Spark. Imports are changed, and nobody here has GPUs.

What the guides leave out is filled in: the model, the data, a loop.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Launcher
from rankzero.compat.ray_train import RunConfig, ScalingConfig, TorchConfig, TorchTrainer, session, train


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


@pytest.mark.parametrize("local_mode", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_converted_loop_of_ray_train(local_mode: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not local_mode:
        request.getfixturevalue("session")
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

    with pytest.warns(DeprecationWarning, match="torch_backend is called torch_config"):
        trainer = TorchTrainer(
            train_func,
            torch_backend=TorchConfig(),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=place,
            launcher=launcher,
        )
    assert trainer.fit().metrics is not None
