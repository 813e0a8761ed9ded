"""Dagster integration of rankzero: distributed PyTorch as assets and ops.

Lives here: the resource that runs training, decorators over it, checks of what came out, a component, and
the IO manager that hands rank 0's value on. May not live here: anything that runs inside ranks, and imports
of torch or pyspark; only Dagster and the core are imported. A name is loaded when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dagster_shared.libraries import DagsterLibraryRegistry

from rankzero import __version__ as __version__

if TYPE_CHECKING:
    from dagster_rankzero.asset import torch_asset as torch_asset
    from dagster_rankzero.checks import build_champion_check as build_champion_check
    from dagster_rankzero.checks import build_metric_bounds_checks as build_metric_bounds_checks
    from dagster_rankzero.component import TorchTrainingComponent as TorchTrainingComponent
    from dagster_rankzero.io_manager import RankZeroIOManager as RankZeroIOManager
    from dagster_rankzero.multi_asset import torch_multi_asset as torch_multi_asset
    from dagster_rankzero.op import torch_distributor_op as torch_distributor_op
    from dagster_rankzero.resource import TorchDistributorResource as TorchDistributorResource

__all__ = [
    "RankZeroIOManager",
    "TorchDistributorResource",
    "TorchTrainingComponent",
    "build_champion_check",
    "build_metric_bounds_checks",
    "torch_asset",
    "torch_distributor_op",
    "torch_multi_asset",
]

_HOMES = {
    "RankZeroIOManager": "io_manager",
    "TorchDistributorResource": "resource",
    "TorchTrainingComponent": "component",
    "build_champion_check": "checks",
    "build_metric_bounds_checks": "checks",
    "torch_asset": "asset",
    "torch_distributor_op": "op",
    "torch_multi_asset": "multi_asset",
}

# Without the flag Dagster warns that our version is not one of its own.
DagsterLibraryRegistry.register("dagster-rankzero", __version__, is_dagster_package=False)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dagster_rankzero' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dagster_rankzero.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
