"""The decorator of Databricks' AI runtime (``serverless_gpu``, ``databricks.air``), for any Spark cluster."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from rankzero import decorator
from rankzero.compat.horovod.runner import run_all
from rankzero.compat.torch_distributor import active_session
from rankzero.engines.spark.engine import SparkEngine
from rankzero.errors import EngineError, InvalidJobError
from rankzero.launcher import Launcher
from rankzero.train import get_context

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


class GPUType(enum.Enum):
    """Kinds of GPUs by name. Here they say nothing: a machine or cluster has the GPUs that it has."""

    A10 = "a10"
    A100 = "a100"
    H100 = "h100"


class DistributedFunction(decorator.DistributedFunction[P, R]):
    """A function whose method `distributed` trains on all ranks. The function itself stays a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the plain function in this process."""
        return self.local(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Trains, and returns the values of all ranks in the order of the ranks. Raises like `Launcher.run`."""
        return run_all(self.launcher, self.launch_function, args, kwargs)


def distributed(
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
    *,
    num_accelerators: int | None = None,
    use_gpu: bool = True,
    **options: Any,
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Decorates a training function, as ``serverless_gpu.distributed`` and ``databricks.air.distributed`` do.

    Args:
        gpus: Number of ranks, each with a GPU; None for all GPUs.
        gpu_type: Kind of the GPUs. Here it has no effect, since a machine or cluster has the GPUs that it has.
        remote: False trains on this machine; True on the cluster of the active SparkSession.
        num_accelerators: The name of ``gpus`` in ``databricks.air``.
        use_gpu: False trains on CPUs.
        options: Further options of `Launcher`.

    Raises:
        InvalidJobError: a value is wrong.
        EngineError: ``remote=True``, and there is no active SparkSession.

    Example:
        >>> from rankzero.compat.databricks import distributed, runtime
        >>> @distributed(gpus=2, use_gpu=False)
        ... def train() -> int:
        ...     return runtime.get_global_rank()
        >>> train.distributed()
        [0, 1]
    """
    if gpus is not None and num_accelerators is not None:
        raise InvalidJobError("gpus and num_accelerators are two names of one argument: give one of them")
    if callable(gpus):
        raise InvalidJobError("write @distributed(), or @distributed(gpus=8), and not @distributed")
    if gpu_type is not None:
        logger.info("gpu_type=%r has no effect: the ranks get the GPUs of the machine or cluster", gpu_type)
    number = num_accelerators if gpus is None else gpus
    launcher = Launcher("auto" if number is None else number, use_gpu=use_gpu, **options)
    if remote and launcher.engine is None:
        if (session := active_session()) is None:
            raise EngineError("remote=True trains on the cluster of the active SparkSession, and there is none")
        launcher = launcher.options(engine=SparkEngine(session=session))
    return lambda function: DistributedFunction(function, launcher)


class runtime:
    """The ranks of this process, by the names of ``serverless_gpu.runtime``."""

    @staticmethod
    def get_global_rank(group: Any = None) -> int:
        """Returns the global rank, or the rank in a process group."""
        if group is not None:
            import torch.distributed as dist

            return int(dist.get_rank(group))
        return get_context().rank

    @staticmethod
    def get_local_rank() -> int:
        """Returns the index of this rank within its task."""
        return get_context().local_rank

    @staticmethod
    def get_local_world_size() -> int:
        """Returns the number of ranks in this task."""
        return get_context().local_world_size

    @staticmethod
    def get_node_rank() -> int:
        """Returns the index of the task, in the order of ranks."""
        return get_context().node_rank

    @staticmethod
    def get_world_size() -> int:
        """Returns the number of ranks."""
        return get_context().world_size


_INSTEAD = {
    "ray_launch": "start Ray by itself, or move the training to rankzero.compat.ray_train",
    "GPU": "GPUType",
}


def __getattr__(name: str) -> NoReturn:
    instead = _INSTEAD.get(name)
    raise AttributeError(f"rankzero.compat.databricks has no {name}" + (f": {instead}" if instead else ""))
