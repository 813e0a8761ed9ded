"""Reductions of sparse gradients, whose rows travel."""

from __future__ import annotations

import torch

from rankzero.compat.horovod.torch.execute import AVERAGE, SUM
from rankzero.compat.horovod.torch.ops import allgather_async
from rankzero.compat.horovod.torch.pending import Pending, synchronize
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str = AVERAGE, process_set: ProcessSet = global_process_set
) -> Pending:
    """Begins a reduction of a sparse tensor, whose rows travel; `synchronize`, or a call, gives a sparse tensor."""
    if op not in (AVERAGE, SUM):
        raise ValueError(f"a sparse gradient can be averaged or summed, not reduced by {op}")
    tensor = tensor.coalesce()
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish(found: torch.Tensor) -> torch.Tensor:
        rows = synchronize(indices)
        scale = found / process_set.size() if op == AVERAGE else found
        return torch.sparse_coo_tensor(rows.t(), scale, tensor.shape, check_invariants=False).coalesce()

    return Pending(values.handle, process_set, finish)


def empty_sparse(like: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse tensor without any row, of the shape and type of another."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=like.device)
    values = like.new_empty((0, *like.shape[sparse_dims:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)
