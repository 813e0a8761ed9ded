"""Horovod's interface on rankzero's launcher: ``from rankzero.compat.horovod import HorovodRunner``.

`rankzero.compat.horovod.torch` implements ``horovod.torch`` with torch.distributed. Runs start through `Launcher` only.
`install` makes ``import horovod.torch`` and ``from sparkdl import HorovodRunner`` find these modules. They keep their
names, so that objects that refer to them are pickled by names that every rank can import.
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
from typing import TYPE_CHECKING, Any

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero.compat.horovod.runner import HorovodRunner, log_to_driver, run

__all__ = ["HorovodRunner", "install", "log_to_driver", "run"]

__version__ = "0.28.1"
"""The version of Horovod whose interface this package has."""

_TORCH = """
    common common.exceptions common.process_sets common.util torch torch.functions torch.mpi_ops torch.optimizer
    torch.sync_batch_norm
"""
_ELASTIC = "common.elastic torch.elastic torch.elastic.sampler torch.elastic.state"

_MODULES = {
    "sparkdl": "",
    "sparkdl.horovod": ".runner",
    "horovod": "",
    "horovod.runner": ".runner",
    "horovod.spark": ".spark",
    "horovod.torch.compression": ".torch.compression",
    **{f"horovod.{name}": ".torch" for name in _TORCH.split()},
    **{f"horovod.{name}": ".torch.elastic" for name in _ELASTIC.split()},
}
"""Names of Horovod's modules, each with the module of this package that has its content."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer for all modules below some packages: it finds rankzero's module, or raises an ImportError."""

    def __init__(self, *roots: str) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_below = any(name == root or name.startswith(f"{root}.") for root in self._roots)
        return importlib.machinery.ModuleSpec(name, self) if is_below else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        found = _MODULES.get(name.replace(__name__, "horovod", 1))
        if found is None:
            raise ImportError(f"{name} is not part of rankzero: docs/migrate.md#horovod has what is, and what to use")
        # The import system returns the module that is registered here.
        sys.modules[name] = importlib.import_module(__name__ + found)


def install() -> None:
    """Lets ``horovod.torch`` and ``sparkdl`` be imported in this process, whether they are installed or not.

    In ranks, the variable ``RANKZERO_HOROVOD=1`` in ``env=`` does the same; `HorovodRunner` and `run` set it.
    """
    if _INSTALLED not in sys.meta_path:
        sys.meta_path.insert(0, _INSTALLED)


def enter_rank(context: Mapping[str, Any]) -> None:
    """Does the same in a rank with the given `rankzero.train.TrainContext`, and sets Horovod's variables."""
    install()
    local_size = context["local_world_size"]
    variables = {
        "RANK": context["rank"], "SIZE": context["world_size"], "HOSTNAME": socket.gethostname(),
        "LOCAL_RANK": context["local_rank"], "LOCAL_SIZE": local_size,
        "CROSS_RANK": context["node_rank"], "CROSS_SIZE": context["world_size"] // local_size,
    }  # fmt: skip
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})


_INSTALLED = _Finder("horovod", "sparkdl")

# The last importer, for Horovod's names without a file here: ``rankzero.compat.horovod.torch.mpi_ops``.
sys.meta_path.append(_Finder(__name__))

# Loaded lazily, since a rank imports this package and launches no run.
lazy_names(__name__, "runner.HorovodRunner runner.log_to_driver runner.run")
