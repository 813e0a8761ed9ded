"""Every name of ``horovod.torch`` is ours, and on the page about coming from Horovod."""

import re

from tests.conftest import ROOT

import rankzero.compat.horovod.torch as hvd

HOROVODS = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
    alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
    broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
    global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
    size sparse_allreduce_async start_timeline stop_timeline synchronize
"""
"""What ``horovod.torch`` 0.28.1 exports."""


def test_every_name_of_horovod_is_there() -> None:
    assert set(HOROVODS.split()) - set(hvd.__all__) == set()
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


def test_the_page_says_what_becomes_of_every_name() -> None:
    page = (ROOT / "docs/migrate-horovod.md").read_text()
    told = set(re.findall(r"`(\w+)`", "".join(line for line in page.splitlines() if line.startswith("|"))))
    assert set(hvd.__all__) - told == set()
