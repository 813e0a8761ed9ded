"""rankzero runs distributed PyTorch as barrier Spark jobs and gives rank 0's result to the next pipeline step.

This package holds the launcher; code that needs Airflow or Dagster belongs in their packages. Importing it imports
neither torch nor pyspark nor numpy, since a public name is loaded when it is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rankzero.compat.torch_distributor import TorchDistributor as TorchDistributor
    from rankzero.data.table import Table as Table
    from rankzero.decorator import distributed as distributed
    from rankzero.engines.connect.engine import SparkConnectEngine as SparkConnectEngine
    from rankzero.engines.local import LocalEngine as LocalEngine
    from rankzero.engines.spark.engine import SparkEngine as SparkEngine
    from rankzero.engines.spark.submit import SparkSubmitEngine as SparkSubmitEngine
    from rankzero.errors import EngineError as EngineError
    from rankzero.errors import HangError as HangError
    from rankzero.errors import InsufficientSlotsError as InsufficientSlotsError
    from rankzero.errors import InvalidJobError as InvalidJobError
    from rankzero.errors import RankZeroError as RankZeroError
    from rankzero.errors import ResultError as ResultError
    from rankzero.errors import RetryableError as RetryableError
    from rankzero.errors import RunCancelledError as RunCancelledError
    from rankzero.errors import RunNotFoundError as RunNotFoundError
    from rankzero.errors import RunTimeoutError as RunTimeoutError
    from rankzero.errors import StartTimeoutError as StartTimeoutError
    from rankzero.errors import WorkerFailedError as WorkerFailedError
    from rankzero.job import CheckpointConfig as CheckpointConfig
    from rankzero.launcher import Launcher as Launcher
    from rankzero.run.handle import RunHandle as RunHandle
    from rankzero.values.ref import ResultRef as ResultRef


def lazy_names(package: str, names: str, root: str | None = None) -> None:
    """Adds names of other modules to a package; each module is imported when a name of it is used.

    Args:
        package: The name of the package.
        names: Paths below the root, separated by spaces: ``"directory.RunDirectory status.RunStatus"``. The last
            part may be a module, too.
        root: The package that the paths begin at; None for the package itself.
    """
    module = vars(sys.modules[package])
    homes = {name: home for home, _, name in (f"{root or package}.{path}".rpartition(".") for path in names.split())}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # With a list of names, `__import__` imports modules of a package like ``from package import module``.
        return getattr(__import__(homes[name], fromlist=[name]), name)

    # Assigned at run time, since a type checker that sees a `__getattr__` accepts every name.
    module |= {"__getattr__": load, "__dir__": lambda: sorted({*module, *homes})}


_NAMES = (
    "compat.torch_distributor.TorchDistributor data.table.Table decorator.distributed "
    "engines.connect.engine.SparkConnectEngine engines.local.LocalEngine engines.spark.engine.SparkEngine "
    "engines.spark.submit.SparkSubmitEngine errors.EngineError errors.HangError errors.InsufficientSlotsError "
    "errors.InvalidJobError errors.RankZeroError errors.ResultError errors.RetryableError errors.RunCancelledError "
    "errors.RunNotFoundError errors.RunTimeoutError errors.StartTimeoutError errors.WorkerFailedError "
    "launcher.Launcher job.CheckpointConfig run.handle.RunHandle values.ref.ResultRef"
)

lazy_names(__name__, _NAMES)

__all__ = sorted(path.rpartition(".")[2] for path in _NAMES.split())
