"""rankzero: distributed PyTorch as barrier Spark jobs, rank 0's result to the next pipeline step.

Lives here: the core launcher. May not live here: anything of Airflow or Dagster. Importing this
package imports neither torch nor pyspark nor numpy; public names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rankzero.compat.torch_distributor import TorchDistributor
    from rankzero.data.table import Table
    from rankzero.engines.connect.engine import SparkConnectEngine
    from rankzero.engines.local import LocalEngine
    from rankzero.engines.spark.engine import SparkEngine
    from rankzero.engines.spark.submit import SparkSubmitEngine
    from rankzero.errors import (
        EngineError,
        HangError,
        InsufficientSlotsError,
        InvalidJobError,
        RankZeroError,
        ResultError,
        RetryableError,
        RunCancelledError,
        RunNotFoundError,
        RunTimeoutError,
        StartTimeoutError,
        WorkerFailedError,
    )
    from rankzero.launcher import Launcher
    from rankzero.run.checkpoints import CheckpointConfig
    from rankzero.run.handle import RunHandle
    from rankzero.values.ref import ResultRef

__all__ = [
    "CheckpointConfig",
    "EngineError",
    "HangError",
    "InsufficientSlotsError",
    "InvalidJobError",
    "Launcher",
    "LocalEngine",
    "RankZeroError",
    "ResultError",
    "ResultRef",
    "RetryableError",
    "RunCancelledError",
    "RunHandle",
    "RunNotFoundError",
    "RunTimeoutError",
    "SparkConnectEngine",
    "SparkEngine",
    "SparkSubmitEngine",
    "StartTimeoutError",
    "Table",
    "TorchDistributor",
    "WorkerFailedError",
]

_HOMES = {
    "CheckpointConfig": "run.checkpoints",
    "Launcher": "launcher",
    "LocalEngine": "engines.local",
    "ResultRef": "values.ref",
    "RunHandle": "run.handle",
    "SparkConnectEngine": "engines.connect.engine",
    "SparkEngine": "engines.spark.engine",
    "SparkSubmitEngine": "engines.spark.submit",
    "Table": "data.table",
    "TorchDistributor": "compat.torch_distributor",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rankzero' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rankzero.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
