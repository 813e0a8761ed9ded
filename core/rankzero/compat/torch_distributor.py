"""`TorchDistributor` of ``pyspark.ml.torch.distributor``, on rankzero's launcher."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rankzero.errors import EngineError, InsufficientSlotsError, InvalidJobError
from rankzero.kinds import POSITIVE
from rankzero.launcher import Launcher

if TYPE_CHECKING:
    from rankzero.engines.base import Engine

R = TypeVar("R")

TASK_GPUS = "spark.task.resource.gpu.amount"


class TorchDistributor:
    """Drop-in for pyspark's class: same constructor, same ``run``, same attributes.

    It differs from pyspark's class as follows: the value is always global rank 0's, a script that fails raises, errors
    name rank and cause, a script is shipped to the executors, and ``local_mode`` needs no SparkSession. A job without
    GPUs cannot see the GPUs of this machine.

    Args:
        num_processes: World size.
        local_mode: True runs on this machine, False as a barrier job of the active SparkSession.
        use_gpu: Whether each rank gets a GPU. With ``local_mode`` there are at most as many ranks as local GPUs.
        _ssl_conf: Name of the Spark property that allows a training on a cluster with encryption.
        num_workers: Old name of ``num_processes``, still found in guides.
        backend: Backend of the process group, as for `rankzero.Launcher`; ``"gloo"`` works with GPUs, too.

    Attributes:
        num_tasks: Number of Spark tasks, or of local processes.
        spark: The active SparkSession; None if there is none.
        ssl_conf: The argument ``_ssl_conf``; the other arguments have attributes of their names.

    Raises:
        InvalidJobError: a value is wrong (a ValueError).
        EngineError: no GPU, no SparkSession, or a conf that gives tasks no GPUs (a RuntimeError).

    Example:
        >>> from rankzero import TorchDistributor
        >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(max, 0.1, 0.5)
        0.5
    """

    _TORCH_SSL_CONF = "pytorch.spark.distributor.ignoreSsl"

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = _TORCH_SSL_CONF,
        *,
        num_workers: int | None = None,
        backend: str | None = "auto",
    ) -> None:
        if num_workers is not None:
            warnings.warn("num_workers is called num_processes", DeprecationWarning, stacklevel=2)
            num_processes = num_workers
        self.logger = logging.getLogger(type(self).__name__)
        self.num_processes: int = POSITIVE.check("num_processes", num_processes)
        self.local_mode = _flag("local_mode", local_mode)
        self.use_gpu = _flag("use_gpu", use_gpu)
        self.ssl_conf = _ssl_conf
        self.spark = active_session()
        if self.spark is None and not self.local_mode:
            raise EngineError(
                "local_mode=False needs an active SparkSession: create one with SparkSession.builder, "
                "or use Launcher(engine=SparkEngine(master=...))"
            )
        self.num_tasks = self._get_num_tasks()
        self._launcher = Launcher(self.num_processes, use_gpu=self.use_gpu, backend=backend)

    @property
    def input_params(self) -> dict[str, Any]:
        """Returns the values of ``num_processes``, ``local_mode``, ``use_gpu`` and ``num_tasks`` by name."""
        return {name: getattr(self, name) for name in ("num_processes", "local_mode", "use_gpu", "num_tasks")}

    def _get_num_tasks(self) -> int:
        if not self.use_gpu:
            return self.num_processes
        if self.local_mode:
            available = _count_gpus(self.spark)
            if not available:
                raise InsufficientSlotsError(
                    f"GPUs were unable to be found on the driver: use_gpu=True needs {self.num_processes} GPUs, one "
                    "for each rank. Set use_gpu=False to train on the CPU",
                )
            if self.num_processes > available:
                self.logger.warning(
                    "num_processes=%s is more than the GPUs on the driver, so it is %s", self.num_processes, available
                )
                self.num_processes = available
            return self.num_processes
        amount = self.spark.conf.get(TASK_GPUS, None)
        if amount is None or amount == "0":
            raise EngineError(f"{TASK_GPUS!r} was unset, so gpu usage is unavailable: set it when the session is made")
        from rankzero.engines.spark.conf import whole_gpus

        per_task = whole_gpus(amount)
        if self.num_processes % per_task:
            raise EngineError(
                f"num_processes={self.num_processes} must be a multiple of {TASK_GPUS!r}, which is {per_task}"
            )
        return self.num_processes // per_task

    def _check_encryption(self) -> None:
        """Raises EngineError for a cluster with encryption, unless its configuration allows the training."""
        if not self._allows("spark.ssl.enabled"):
            return
        exposed = "arguments, gradients and results cross the network without encryption"
        if not self._allows(self.ssl_conf):
            raise EngineError(
                f"the cluster has TLS encryption enabled (spark.ssl.enabled), but {exposed}: "
                f"set {self.ssl_conf!r} to 'true' in the Spark configuration to train without it"
            )
        self.logger.warning("the cluster has TLS encryption enabled, but %s, as %s allows", exposed, self.ssl_conf)

    def _allows(self, name: str) -> bool:
        return self.spark is not None and self.spark.conf.get(name, "false").strip().lower() == "true"

    @overload
    def run(self, train_object: Callable[..., R], *args: Any, **kwargs: Any) -> R: ...
    @overload
    def run(self, train_object: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any: ...
    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a function or a script and returns rank 0's value.

        Args:
            train_object: A function, or the path of a script.
            args: Positional arguments of the function, or the script's command line.
            kwargs: Keyword arguments of the function.

        Raises:
            EngineError: the cluster requires encryption.
            RankZeroError: see `Launcher.run`.
        """
        launcher = self._launcher
        if not self.local_mode:
            self._check_encryption()
            per_task = self.num_processes // self.num_tasks
            launcher = launcher.options(engine=engine_of_session(self.spark), processes_per_task=per_task)
        return launcher.run(train_object, *args, **kwargs)


def _flag(name: str, value: Any) -> bool:
    """Returns a flag, which may be a bool of numpy, 0 or 1, as a bool. Raises InvalidJobError."""
    if isinstance(value, (str, type(None))) or value not in (True, False):
        raise InvalidJobError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def _count_gpus(session: Any) -> int:
    """Returns the number of GPUs that Spark's driver was given; without any, of those that the system lists."""
    context = getattr(session, "_sc", None)
    if context is not None and (resource := context.resources.get("gpu")) is not None:
        return len(resource.addresses)
    from rankzero.engines.gpus import local_gpus

    return len(local_gpus())


def active_session() -> Any:
    """Returns the active SparkSession of this thread or process; None if there is none, or pyspark is not loaded."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkException:
        return None


def engine_of_session(session: Any) -> Engine:
    """Returns the engine that uses a SparkSession of this process, classic or of Spark Connect."""
    from rankzero.engines.connect.engine import SparkConnectEngine, is_connect_session

    if is_connect_session(session):
        return SparkConnectEngine(session=session)
    from rankzero.engines.spark.engine import SparkEngine

    return SparkEngine(session=session)
