"""Objects, from one rank to all, and from all to all. cloudpickle takes a notebook's classes and lambdas, too."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch

from rankzero.compat.horovod.torch.messages import bytes_of
from rankzero.compat.horovod.torch.ops import allgather, broadcast_
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """An object of one rank, on every rank."""
    name = name or "broadcast_object"
    is_root = global_process_set.rank() == root_rank
    data = (
        torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
        if is_root
        else torch.empty(0, device="cpu")
    )
    length = broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    data = broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else pickle.loads(bytes_of(data))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    name = name or "allgather_object"
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    sizes = allgather(torch.tensor([len(data)], device="cpu"), f"{name}.sizes", process_set).tolist()
    whole = allgather(data, f"{name}.data", process_set)
    return [pickle.loads(bytes_of(part)) for part in torch.split(whole, sizes)]
