"""``horovod.torch`` on torch.distributed: ``import rankzero.compat.horovod.torch as hvd``.

Imports torch, so import it in the training function's own module, or in the function.
"""

# ruff: noqa: I001 (packed imports: one name a line would be a hundred lines)

from torch.nn import SyncBatchNorm

from rankzero.compat.horovod.torch import elastic
from rankzero.compat.horovod.torch.collectives import (
    Adasum, Average, Compression, Compressor, FP16Compressor, Max, Min, Product, Sum, allgather, allgather_async,
    allgather_object, allreduce, allreduce_, allreduce_async, allreduce_async_, alltoall, alltoall_async, barrier,
    broadcast, broadcast_, broadcast_async, broadcast_async_, broadcast_object, grouped_allgather,
    grouped_allgather_async, grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_,
    grouped_reducescatter, grouped_reducescatter_async, join, poll, reducescatter, reducescatter_async,
    sparse_allreduce_async, synchronize,
)  # fmt: skip
from rankzero.compat.horovod.torch.operations import (
    HorovodInternalError, HostsUpdatedInterrupt, MismatchError, StallError,
)  # fmt: skip
from rankzero.compat.horovod.torch.optimizer import (
    DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters,
)  # fmt: skip
from rankzero.compat.horovod.torch.world import (
    ProcessSet, add_process_set, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, global_process_set,
    gloo_built, gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_size, mpi_built, mpi_enabled,
    mpi_threads_supported, nccl_built, rank, remove_process_set, rocm_built, shutdown, size,
)  # fmt: skip

__all__ = [
    "Adasum", "Average", "Compression", "Compressor", "DistributedOptimizer", "FP16Compressor",
    "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Min", "MismatchError", "ProcessSet", "Product",
    "StallError", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set",
    "rocm_built", "shutdown", "size", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
