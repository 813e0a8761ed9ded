"""Handwritten digits: the plain PyTorch code that both pipelines share. Knows no orchestrator.

Data: scikit-learn's ``load_digits``, 1,797 scans of 8 x 8 pixels, part of the package. The
champion, the model in production, lies in ``$DIGITS_HOME`` (default ``~/.rankzero/digits``).
"""

import json
import os
from pathlib import Path
from typing import Any

TEST_FRACTION = 0.2
SEED = 7
CLASSES = 10


def prepare() -> dict[str, Any]:
    """Loads the scans and splits them, the same way every night.

    Returns:
        ``train_images`` (N, 1, 8, 8) float32 in 0..1, ``train_labels`` (N,) int64, and the same for ``test_``.
    """
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_FRACTION, random_state=SEED, stratify=labels.tolist()
    )
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }


def build_model() -> Any:
    """A small convolutional network, 8 x 8 pixels to `CLASSES` scores."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def train(
    data: dict[str, Any],
    epochs: int = 25,
    lr: float = 4e-3,
    batch_size: int = 32,
    start: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains with DistributedDataParallel; every rank runs this. Continues from the last checkpoint, if there is one.

    Args:
        data: What `prepare` returned.
        epochs: Passes over the training scans.
        lr: Learning rate of Adam.
        batch_size: Scans per rank and step.
        start: Weights to start from, a state dict; None starts from random ones.

    Returns:
        The model's state dict (rank 0's is the run's result).
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import rankzero.train as rt

    context = rt.get_context()
    dist.init_process_group(context.backend)
    torch.manual_seed(SEED)
    network = build_model().to(context.device)
    if start is not None:
        network.load_state_dict(start)
    model = DistributedDataParallel(network)
    dataset = TensorDataset(data["train_images"], data["train_labels"])
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loss_function = torch.nn.CrossEntropyLoss()
    first_epoch = 0
    if checkpoint := rt.get_checkpoint():
        state = checkpoint.load()
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_function(model(images.to(context.device)), labels.to(context.device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        rt.report({"epoch": epoch, "loss": total / len(loader)}, checkpoint=state if context.rank == 0 else None)
        if context.rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    return dict(model.module.state_dict())


def accuracy(state: dict[str, Any], data: dict[str, Any]) -> float:
    """Share of the test scans that the model reads right."""
    import torch

    model = build_model()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        guesses = model(data["test_images"]).argmax(dim=1)
    return float((guesses == data["test_labels"]).float().mean())


def home() -> Path:
    """Returns the directory of the champion."""
    return Path(os.environ.get("DIGITS_HOME", "~/.rankzero/digits")).expanduser()


def champion() -> dict[str, Any] | None:
    """``{"accuracy": ..., "model": ...}`` of the model in production, or None before the first."""
    try:
        return dict(json.loads((home() / "champion.json").read_text()))
    except FileNotFoundError:
        return None


def beats_champion(challenger: float) -> bool:
    """The gate: at least as good as the model in production."""
    reigning = champion()
    return reigning is None or challenger >= float(reigning["accuracy"])


def promote(challenger: float, model: dict[str, Any]) -> dict[str, Any]:
    """Makes a model the champion, atomically.

    Args:
        challenger: Its accuracy.
        model: Where it lies, JSON-able.
    """
    record = {"accuracy": challenger, "model": model}
    _replace("champion.json", record)
    return record


def deploy(weights: dict[str, Any], champion: dict[str, Any]) -> dict[str, Any]:
    """Delivers a model to the serving side: checks that it answers, then writes ``manifest.json``, atomically.

    Args:
        weights: The champion's state dict.
        champion: What `champion` said of it.

    Returns:
        The manifest, from which a server loads the model.
    """
    import torch

    model = build_model()
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        scores = model(torch.zeros(1, 1, 8, 8))
    if scores.shape != (1, CLASSES) or not scores.isfinite().all():
        raise ValueError(f"the model {champion['model']} does not answer with {CLASSES} scores: promote another one")
    manifest = {**champion, "input": [1, 8, 8], "classes": CLASSES}
    _replace("manifest.json", manifest)
    return manifest


def _replace(name: str, record: dict[str, Any]) -> None:
    home().mkdir(parents=True, exist_ok=True)
    temporary = home() / f"{name}.new"
    temporary.write_text(json.dumps(record, indent=2))
    temporary.replace(home() / name)
