"""Airflow provider of rankzero: run PyTorch training as a task, get rank 0's result through XCom.

Lives here: what Airflow needs to know, as thin layers over core. May not live here: anything that
launches, follows or ends a run; that is core's. Rooms: `hooks`, `connection` (where a training runs),
`openlineage`; beside them the operator with its parts, the decorator, the trigger, links, options
(`config`) and the plugin. Importing this package imports no torch, no pyspark, and Airflow only when
a name is used, since Airflow imports it while it configures itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_rankzero.decorators import torch_distributor
    from airflow_rankzero.operators import TorchDistributorOperator

__all__ = ["TorchDistributorOperator", "torch_distributor"]

_HOMES = {"TorchDistributorOperator": "operators", "torch_distributor": "decorators"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'airflow_rankzero' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"airflow_rankzero.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("airflow", "airflow.sdk"):
            raise
        raise ImportError(f"{name} needs Airflow 3.1 or newer: pip install 'rankzero[airflow]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
