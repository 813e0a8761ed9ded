"""Dagster integration of rankzero: distributed PyTorch as assets and ops.

Each line imports only from the lines below it:

    component               a training as a folder with a YAML file
    decorators  compute     functions that become assets and ops; the functions of their steps
    resource  fields        runs a training for a step; its options, and their refusal of unknown names
    step                    one try of a step, and its run
    io_manager  checks      the storage of an output; asset checks
    metadata  inputs        the output of a step and its metadata for the UI; the arguments of ranks
    _compat                 every use of Dagster's private interfaces

This package runs outside of ranks. It imports Dagster and core, and neither torch nor pyspark. A name is loaded when
it is used.
"""

from typing import TYPE_CHECKING

from dagster_shared.libraries import DagsterLibraryRegistry

from rankzero import __version__ as __version__
from rankzero import lazy_names

if TYPE_CHECKING:
    from dagster_rankzero.checks import build_champion_check as build_champion_check
    from dagster_rankzero.checks import build_metric_bounds_checks as build_metric_bounds_checks
    from dagster_rankzero.component import TorchTrainingComponent as TorchTrainingComponent
    from dagster_rankzero.decorators import torch_asset as torch_asset
    from dagster_rankzero.decorators import torch_distributor_op as torch_distributor_op
    from dagster_rankzero.decorators import torch_multi_asset as torch_multi_asset
    from dagster_rankzero.io_manager import RankZeroIOManager as RankZeroIOManager
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

# Without the flag Dagster warns that this version differs from its own.
DagsterLibraryRegistry.register("dagster-rankzero", __version__, is_dagster_package=False)

lazy_names(
    __name__,
    "checks.build_champion_check checks.build_metric_bounds_checks component.TorchTrainingComponent "
    "decorators.torch_asset decorators.torch_distributor_op decorators.torch_multi_asset "
    "io_manager.RankZeroIOManager resource.TorchDistributorResource",
)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
