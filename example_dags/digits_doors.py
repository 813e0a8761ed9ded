"""The digits training, written for other launchers: only imports differ from what runs there.

Each function is a training in the style of one launcher. Knows no orchestrator.
"""

from typing import Any

import digits

from rankzero import distributed as rankzero_distributed
from rankzero.compat.ray_train import ScalingConfig, TorchTrainer
from rankzero.compat.ray_train import train as ray_train


def ray_loop(config: dict[str, Any]) -> float:
    """Ray Train's style: a function of a configuration, whose helpers prepare model and loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = config["data"]
    torch.manual_seed(digits.SEED)
    model = ray_train.torch.prepare_model(digits.build_model())
    loader = DataLoader(TensorDataset(data["train_images"], data["train_labels"]), batch_size=32, shuffle=True)
    loader = ray_train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        ray_train.report({"epoch": epoch, "loss": loss.item()})
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return digits.accuracy(state, data)


def ray_trainer(data: Any, epochs: int) -> TorchTrainer:
    """Returns Ray Train's trainer of `ray_loop`, which takes the place of a training function."""
    config = {"data": data, "epochs": epochs, "lr": 4e-3}
    return TorchTrainer(ray_loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2))


@rankzero_distributed(num_processes=2)
def decorated(data: dict[str, Any], epochs: int) -> float:
    """The decorator of rankzero itself: a call trains on all ranks and returns rank 0's value."""
    return digits.accuracy(digits.train(data, epochs), data)
