"""Dagster integration of rankzero: distributed PyTorch as assets and ops.

Lives here: the resource that runs training, decorators over it, and the IO manager that hands
rank 0's value on. May not live here: anything that runs inside ranks, and imports of torch or
pyspark; only Dagster and the core are imported.
"""

from dagster_rankzero._compat import register_library
from dagster_rankzero.asset import torch_asset as torch_asset
from dagster_rankzero.io_manager import RankZeroIOManager as RankZeroIOManager
from dagster_rankzero.op import torch_distributor_op as torch_distributor_op
from dagster_rankzero.resource import TorchDistributorResource as TorchDistributorResource
from rankzero import __version__ as __version__

__all__ = ["RankZeroIOManager", "TorchDistributorResource", "torch_asset", "torch_distributor_op"]

register_library("dagster-rankzero", __version__)
