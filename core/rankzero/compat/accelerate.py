"""`notebook_launcher` of Hugging Face's Accelerate, on rankzero's launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rankzero.engines.gpus import local_gpus
from rankzero.errors import InvalidJobError
from rankzero.launcher import Launcher

R = TypeVar("R")

PRECISIONS = ("no", "fp16", "bf16", "fp8")


def notebook_launcher(
    function: Callable[..., R],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    launcher: Launcher | None = None,
) -> R:
    """Calls a function on every rank, as ``accelerate.notebook_launcher`` does, and returns rank 0's value.

    The ranks are processes of this machine, or of the launcher's cluster. Accelerate itself is needed only by the
    function. The notebook may have used a GPU or loaded any library before.

    Args:
        function: The training function, which makes its ``Accelerator``.
        args: Positional arguments of the function.
        num_processes: Number of ranks. None: the launcher's; without one a rank for each GPU of this machine, or for
            each core if it has no GPU.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``: the precision of an ``Accelerator()``.
        use_port: Accepted for compatibility; rankzero finds a port.
        master_addr: Accepted for compatibility.
        node_rank: Refused, unless it is 0.
        num_nodes: Refused, unless it is 1.
        rdzv_backend: Accepted for compatibility.
        rdzv_endpoint: Accepted for compatibility.
        rdzv_conf: Accepted for compatibility.
        rdzv_id: Accepted for compatibility.
        max_restarts: New attempts after a rank was lost.
        monitor_interval: Accepted for compatibility.
        log_line_prefix_template: Accepted for compatibility.
        launcher: The engine, and all other options. None: ranks on this machine, on its GPUs if it has any.

    Raises:
        InvalidJobError: a value is wrong, or means several nodes.
        RankZeroError: see `Launcher.run`.

    Example:
        >>> from rankzero.compat.accelerate import notebook_launcher
        >>> notebook_launcher(max, (0.1, 0.5), num_processes=2)
        0.5
    """
    if mixed_precision not in PRECISIONS:
        raise InvalidJobError(f"mixed_precision is {mixed_precision!r}; choose one of {', '.join(PRECISIONS)}")
    if node_rank or num_nodes != 1:
        raise InvalidJobError(
            f"num_nodes is {num_nodes!r} and node_rank is {node_rank!r}; one call starts the ranks of all nodes: leave "
            "them out, and give launcher=Launcher(engine=SparkEngine(...))"
        )
    if not isinstance(args, (tuple, list)):
        raise InvalidJobError(f"args is {args!r}; give a tuple, such as ({args!r},)")
    base = launcher or Launcher("auto", use_gpu=bool(local_gpus()))
    ready = base.options(
        num_processes=base.num_processes if num_processes is None else num_processes,
        max_restarts=max_restarts or base.max_restarts,
        env={
            "ACCELERATE_MIXED_PRECISION": mixed_precision,
            "ACCELERATE_USE_CPU": "false" if base.use_gpu else "true",
            **(base.env or {}),
        },
    )
    return ready.run(function, *args)
