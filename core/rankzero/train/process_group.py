"""The process group of a training function, created by the first call that needs one, and collectives of objects."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from rankzero.train.context import get_context

GROUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective; a rank that fails is reported long before."""

P = ParamSpec("P")
R = TypeVar("R")


def ensure_process_group(timeout: timedelta = GROUP_TIMEOUT) -> None:
    """Creates torch's default process group, unless the training function has created it.

    The backend is ``nccl`` for ranks with a GPU and else ``gloo``, or the launcher's ``backend``. A world of one rank
    gets a group, too. The group is never destroyed: a rank ends without waiting for others.

    Args:
        timeout: Time after which a collective that waits for other ranks fails.

    Raises:
        RuntimeError: the job leaves the process group to the training function (``backend=None``).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    context = get_context()
    if context.backend is None:
        raise RuntimeError(
            "backend=None leaves the process group to the training function: "
            "call torch.distributed.init_process_group first, or launch with backend='auto'"
        )
    device = context.device
    more: dict[str, Any] = {} if context.backend == "gloo" else {"device_id": device}
    if context.world_size == 1 and "MASTER_ADDR" not in os.environ:
        more |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(context.backend, timeout=timeout, **more)
    # A rank that returned before the others have connected would break their connections.
    barrier()


def barrier() -> None:
    """Waits until every rank has called it. Raises RuntimeError after 30 minutes, or if the process of a rank died."""
    if get_context().world_size > 1:
        import torch.distributed as dist

        ensure_process_group()
        device = _object_device()
        dist.barrier(device_ids=None if device is None else [device.index])


def broadcast_object(value: R, source: int = 0) -> R:
    """Returns the picklable object of the rank ``source`` on every rank. The values of other ranks are ignored.

    Example:
        >>> import rankzero.train as rt
        >>> rt.broadcast_object({"seed": 7})
        {'seed': 7}
    """
    if get_context().world_size == 1:
        return value
    import torch.distributed as dist

    ensure_process_group()
    found = [value]
    dist.broadcast_object_list(found, source, device=_object_device())
    return found[0]


def all_gather_object(value: R) -> list[R]:
    """Returns the picklable objects of all ranks, in the order of ranks, on every rank.

    Example:
        >>> import rankzero.train as rt
        >>> rt.all_gather_object("a")
        ['a']
    """
    world_size = get_context().world_size
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    ensure_process_group()
    # torch sends the objects by the current GPU.
    _object_device()
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def on_rank_zero(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorates a function to run on rank 0 only; on other ranks a call returns None.

    Example:
        >>> import rankzero.train as rt
        >>> @rt.on_rank_zero
        ... def log(epoch):
        ...     print(f"epoch {epoch}")
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if get_context().rank == 0 else None

    return guarded


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Runs the block on one rank of each host first, then on the host's other ranks: one download for each host.

    A rank that fails in the block ends the attempt; the other ranks do not wait for it.
    """
    hosts = all_gather_object(socket.gethostname())
    is_first = hosts.index(socket.gethostname()) == get_context().rank
    if not is_first:
        barrier()
    yield
    if is_first:
        barrier()


def _object_device() -> Any:
    """Returns the device for collectives of pickled objects: this rank's GPU; None with gloo, or without a GPU."""
    import torch
    import torch.distributed as dist

    device = get_context().device
    # A group that was created without a backend has one for each type of device, so its name is not "gloo".
    if device.type == "cpu" or dist.get_backend() == "gloo":
        return None
    torch.get_device_module(device).set_device(device)
    return device
