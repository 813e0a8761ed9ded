"""Airflow provider of rankzero: runs PyTorch training as a task and passes rank 0's result on through XCom.

The modules are thin layers over core, which launches, follows and ends runs, and have the names of Airflow's nouns.
`provider_info` stands apart because Airflow imports it while it configures itself; `_compat` has everything of Airflow
that is private or differs between its versions. Importing this package imports neither torch nor pyspark, and Airflow
only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from airflow_rankzero.decorators import torch_distributor
    from airflow_rankzero.operators import TorchDistributorOperator
    from airflow_rankzero.provider_info import store_or_default

__all__ = ["TorchDistributorOperator", "store_or_default", "torch_distributor"]

lazy_names(
    __name__,
    "decorators.torch_distributor operators.TorchDistributorOperator provider_info.store_or_default",
)
