"""`TorchDistributor` of ``pyspark.ml.torch.distributor``, on rankzero's launcher."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

from rankzero.errors import EngineError, InvalidJobError
from rankzero.launcher import Launcher

R = TypeVar("R")


class TorchDistributor:
    """Drop-in for pyspark's class: same constructor, same ``run``.

    Differences that a user of pyspark's class will notice: the value is always global rank 0's, a
    script that fails raises, errors name rank and cause, and a script is shipped to the executors.

    Args:
        num_processes: World size.
        local_mode: True runs on this machine, False as a barrier job of the active SparkSession.
        use_gpu: One GPU for each rank.
        num_workers: Old name of ``num_processes``, still found in guides.

    Raises:
        InvalidJobError: a value is wrong.

    Example:
        >>> from rankzero import TorchDistributor
        >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(max, 0.1, 0.5)
        0.5
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        *,
        num_workers: int | None = None,
    ) -> None:
        if num_workers is not None:
            warnings.warn("num_workers is called num_processes", DeprecationWarning, stacklevel=2)
            num_processes = num_workers
        if type(local_mode) is not bool:
            raise InvalidJobError(f"local_mode is {local_mode!r}; it must be True or False")
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self._launcher = Launcher(num_processes, use_gpu=use_gpu)

    @overload
    def run(self, train_object: Callable[..., R], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def run(self, train_object: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> Any: ...
    def run(self, train_object: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a function or a script and returns rank 0's value.

        Raises:
            EngineError: ``local_mode=False`` without an active SparkSession.
            RankZeroError: see `Launcher.run`.
        """
        launcher = self._launcher
        if not self.local_mode:
            from rankzero.engines.spark.engine import SparkEngine, gpus_per_task

            session = _active_session()
            most = gpus_per_task(session) if self.use_gpu else 1
            per_task = max(count for count in range(1, most + 1) if self.num_processes % count == 0)
            launcher = launcher.options(engine=SparkEngine(session=session), processes_per_task=per_task)
        return launcher.run(train_object, *args, **kwargs)


def _active_session() -> Any:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise EngineError(
            "local_mode=False needs an active SparkSession: create one with SparkSession.builder, "
            "or use Launcher(engine=SparkEngine(master=...))"
        )
    return session
