"""What the pages leave to their readers, so that their blocks run: names, and files in the working directory."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rankzero


def training(lr: float = 0.1) -> float:
    """Where a page calls a function of the reader's."""
    return lr


PUBLIC = {name: getattr(rankzero, name) for name in rankzero.__all__}

SCRIPT = "import rankzero.train as rt\nrt.set_result(rt.get_context().rank)\n"


def python() -> dict[str, Any]:
    Path("train.py").write_text(SCRIPT)
    # The page only names the session: no JVM for that.
    return {**PUBLIC, "spark": SimpleNamespace(_jsparkSession=None)}


def clusters() -> dict[str, Any]:
    for folder in ("project", "lib/common"):
        os.makedirs(folder)
    zipfile.ZipFile("extra.zip", "w").close()
    return {**PUBLIC, "train": training, "errno": errno}


def migrate() -> dict[str, Any]:
    Path("train.py").write_text(SCRIPT)
    Path("train.sh").write_text('test -n "$RANK"\n')
    os.makedirs("acme")
    Path("acme/__init__.py").touch()
    Path("acme/train.py").write_text(SCRIPT)
    return {"Launcher": rankzero.Launcher, "SparkEngine": rankzero.SparkEngine}


def training_page() -> dict[str, Any]:
    import torch

    import rankzero.train as rt

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    rows = torch.utils.data.TensorDataset(torch.randn(8, 8))
    return {
        "rt": rt,
        "model": rt.prepare_model(model),
        "optimizer": optimizer,
        "x": torch.randn(4, 8),
        "step": 3,
        "loss": 0.5,
        "loader": rt.prepare_data_loader(torch.utils.data.DataLoader(rows)),
    }


def checkpoint() -> dict[str, Any]:
    """What the training of `docs/training.md` has saved."""
    return {"loader": training_page()["loader"].state_dict()}


def operations() -> dict[str, Any]:
    rankzero.Launcher(1).run(training)
    return {}


def reports() -> dict[str, Any]:
    Path("train.py").write_text(SCRIPT)
    rankzero.Launcher(1, run_id="digits").run(training)
    for name in ("a", "b", "c", "digits"):
        shutil.copytree(os.path.join(os.environ["RANKZERO_STORE"], "digits"), f"runs/{name}")
    return {**PUBLIC}


class Warehouse:
    """A SparkSession that has the page's table."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def table(self, name: str) -> Any:
        """The table of the reader's, whatever its name."""
        rows = [([float(number), 1.0], float(number % 2)) for number in range(64)]
        return self._session.createDataFrame(rows, "features array<double>, label double")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def step(features: Any, label: Any) -> float:
    """The reader's."""
    return float((features.sum(1) - label).square().mean())


def score(batches: Any) -> Any:
    """The reader's."""
    return ({"score": batch["features"].sum(1)} for batch in batches)


def data(session: Any) -> dict[str, Any]:
    return {"spark": Warehouse(session), "step": step, "score": score}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/clusters.md": clusters,
    "docs/migrate.md": migrate,
    "docs/operations.md": operations,
    "docs/python.md": python,
    "docs/training.md": training_page,
    "docs/reports.md": reports,
}
"""What a page leaves to its reader: names, and files in the working directory."""
