"""Dagster integration of rankzero: distributed PyTorch as assets and ops.

This package runs outside of ranks. It imports Dagster and core, and neither torch nor pyspark. A name is loaded when
it is used. Each module imports only from those behind it: component decorators resource step checks io_manager
metadata inputs _compat.
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

_NAMES = (
    "checks.build_champion_check checks.build_metric_bounds_checks component.TorchTrainingComponent "
    "decorators.torch_asset decorators.torch_distributor_op decorators.torch_multi_asset "
    "io_manager.RankZeroIOManager resource.TorchDistributorResource"
)
__all__ = sorted(path.partition(".")[2] for path in _NAMES.split())

# Without the flag Dagster warns that this version differs from its own.
DagsterLibraryRegistry.register("dagster-rankzero", __version__, is_dagster_package=False)

lazy_names(__name__, _NAMES)
