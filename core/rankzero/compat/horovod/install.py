"""`install` makes ``import horovod.torch`` and ``from sparkdl import HorovodRunner`` find rankzero's modules.

The modules keep rankzero's names. Objects that refer to them are therefore pickled by names that every rank can import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_HERE = "rankzero.compat.horovod"

_PLACES = {
    "sparkdl": "",
    "sparkdl.horovod": ".runner",
    "sparkdl.horovod.runner_base": ".runner",
    "horovod": "",
    "horovod.common": ".torch",
    "horovod.common.elastic": ".torch.elastic",
    "horovod.common.exceptions": ".torch",
    "horovod.common.process_sets": ".torch.world",
    "horovod.common.util": ".util",
    "horovod.runner": ".runner",
    "horovod.spark": ".spark",
    "horovod.torch": ".torch",
    "horovod.torch.compression": ".torch.compression",
    "horovod.torch.elastic": ".torch.elastic",
    "horovod.torch.elastic.sampler": ".torch.elastic",
    "horovod.torch.elastic.state": ".torch.elastic",
    "horovod.torch.functions": ".torch",
    "horovod.torch.mpi_ops": ".torch",
    "horovod.torch.optimizer": ".torch.optimizer",
    "horovod.torch.sync_batch_norm": ".torch.optimizer",
}
"""Names of Horovod's modules, each with the module of this package that has its content."""

_TORCH = ", which trains torch: use {root}.torch"
_ESTIMATORS = ": give a training function to {root}.spark.run, and the DataFrame as dataset= of its launcher"

_INSTEAD = {
    "tensorflow": _TORCH,
    "keras": _TORCH,
    "mxnet": _TORCH,
    "ray": ": use rankzero.compat.ray_train, or Launcher",
    "data": ": use torch.utils.data.DataLoader",
    "spark.common": _ESTIMATORS,
    "spark.keras": _TORCH,
    "spark.lightning": _ESTIMATORS,
    "spark.task": ": the GPU of a rank is torch.device('cuda', hvd.local_rank())",
    "spark.tensorflow": _TORCH,
    "spark.torch": _ESTIMATORS,
}
"""Advice for Horovod's modules that this package does not have."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer for every module below some packages: it finds rankzero's module, or raises an error with advice.

    Args:
        roots: Names of the packages.
    """

    def __init__(self, *roots: str) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(f"{root}.") for root in self._roots):
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        root = next(root for root in self._roots if name == root or name.startswith(f"{root}."))
        below = name.removeprefix(root).removeprefix(".")
        place = _PLACES.get(f"horovod.{below}" if root == _HERE else name)
        if place is None:
            instead = _INSTEAD.get(below, ": see docs/migrate-horovod.md for what is")
            raise ImportError(f"{name} is not part of rankzero{instead.format(root=root)}")
        # The import system returns the module that is registered here.
        sys.modules[name] = importlib.import_module(_HERE + place)


def install() -> None:
    """Lets ``horovod.torch`` and ``sparkdl`` be imported in this process, whether they are installed or not.

    In ranks, the variable ``RANKZERO_HOROVOD=1`` in ``env=`` does the same; `HorovodRunner` and `run` set it.
    """
    if _INSTALLED not in sys.meta_path:
        sys.meta_path.insert(0, _INSTALLED)


def install_in_rank(context: Mapping[str, Any]) -> None:
    """Does the same in a rank and in the processes that it starts, and sets the variables that Horovod's ranks have.

    Args:
        context: The ranks and world sizes, by the names of `rankzero.train.TrainContext`.
    """
    install()
    package = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.join(package, "children"), os.path.dirname(os.path.dirname(os.path.dirname(package)))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *places])
    local_size = context["local_world_size"]
    variables = {
        "RANK": context["rank"],
        "SIZE": context["world_size"],
        "LOCAL_RANK": context["local_rank"],
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": context["node_rank"],
        "CROSS_SIZE": context["world_size"] // local_size,
        "HOSTNAME": socket.gethostname(),
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})


def answer_here() -> None:
    """Lets Horovod's names be imported from this package, too: ``rankzero.compat.horovod.torch.mpi_ops``."""
    # The last importer, for names without a file in this package.
    if _OWN not in sys.meta_path:
        sys.meta_path.append(_OWN)


_INSTALLED = _Finder("horovod", "sparkdl")
_OWN = _Finder(_HERE)
