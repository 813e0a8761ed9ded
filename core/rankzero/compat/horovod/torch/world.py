"""The rank of this process, and the sets of ranks that communicate."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import rankzero.train as rt
from rankzero.compat.horovod.torch.coordinator import Coordinator
from rankzero.compat.horovod.torch.operations import Meta
from rankzero.train.context import at_return

STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": 60.0, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": 1800.0}
"""Horovod's variables for the seconds until a stall is warned of and until it is an error, and their defaults."""


class ProcessSet:
    """A set of ranks that communicate with each other, by their global ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(set(ranks))
        self.process_set_id: int | None = None
        self._coordinator: Coordinator | None = None
        self.optimizers = itertools.count(1)
        """Numbers of the optimizers that reduce gradients over this set."""

    @property
    def coordinator(self) -> Coordinator:
        """Returns the coordinator that executes the set's operations. Raises ValueError before it is created."""
        if self._coordinator is None:
            raise ValueError("Horovod has not been initialized; use hvd.init(), and hvd.add_process_set for other sets")
        return self._coordinator

    def size(self) -> int:
        """Returns the number of ranks in the set."""
        return self.coordinator.size

    def rank(self) -> int:
        """Returns the index of this rank in the set; -1 if it is not a member."""
        return self.coordinator.rank

    def included(self) -> bool:
        """Returns True if this rank is a member of the set."""
        return self.coordinator.rank >= 0

    def _open(self, number: int) -> None:
        limits = (float(os.environ.get(name) or 0) or default for name, default in STALLS.items())
        self._coordinator = Coordinator(next(_opened), self.ranks, *limits)
        self.process_set_id, _sets[number] = number, self

    def _close(self) -> None:
        self.coordinator.close()
        del _sets[self.process_set_id or 0]
        self._coordinator = self.process_set_id = None


global_process_set = ProcessSet([])
_sets: dict[int, ProcessSet] = {}
_opened = itertools.count()
_world: Any = None
_process = 0
"""torch's process group, and the process, when this process became a rank."""


def init(*, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Makes this process a rank, and creates torch's process group if there is none. A second call does nothing.

    ``process_sets`` are sets as for `add_process_set`.
    """
    global _world, _process
    if is_initialized():
        return
    # Ends the sets of an earlier training of this process that failed.
    shutdown()
    rt.ensure_process_group()
    _world, _process = dist.group.WORLD, os.getpid()
    global_process_set.ranks = list(range(dist.get_world_size()))
    global_process_set._open(0)
    at_return(shutdown)
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


# Before Python finalizes: a thread of gloo or of a coordinator that needs Python after that aborts the process.
@atexit.register
def shutdown() -> None:
    """Ends this rank's part once all ranks end theirs; operations that still wait for this rank fail on other ranks."""
    # A process that a rank has forked has none of its threads.
    found = list(_sets.values()) if _process == os.getpid() else []
    for process_set in found:
        process_set.coordinator.end()
    for process_set in found:
        process_set._close()


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`, or the end of torch's process group."""
    return global_process_set._coordinator is not None and dist.is_initialized() and dist.group.WORLD is _world


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set of ranks able to communicate. Every rank must call it, with the same sets in the same order.

    Raises ValueError for ranks that do not exist, or have a set already, and MismatchError if the ranks' sets differ.
    """
    everybody = global_process_set.coordinator.ranks
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not found.ranks or not set(found.ranks) <= set(everybody):
        raise ValueError(f"process set {found.ranks} has ranks that do not exist; there are {len(everybody)}")
    if any(found.ranks == other.ranks for other in _sets.values()):
        raise ValueError(f"a process set of the ranks {found.ranks} is there already")
    # Ranks that create different groups, or that have joined, would block the others; this names them.
    number, meta = max(_sets) + 1, Meta("process_set", shape=tuple(found.ranks))
    global_process_set.coordinator.issue("process_set", str(number), [meta], [torch.empty(0, device="cpu")]).wait()
    found._open(number)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; returns False for an unknown set and for the global one. Every rank must call it."""
    if process_set is global_process_set or process_set not in _sets.values():
        return False
    process_set.coordinator.end()
    process_set._close()
    return True


def rank() -> int:
    """Returns the global rank of this process."""
    return global_process_set.coordinator.rank


def size() -> int:
    """Returns the number of ranks."""
    return global_process_set.coordinator.size


def _answer(text: str, value: Callable[[], Any]) -> Callable[[], int]:
    """Returns a function that answers a question about the rank or about torch by a number."""

    def answer() -> int:
        return int(value())

    answer.__doc__ = f"Returns {text}."
    return answer


def _of_context(name: str, text: str) -> Callable[[], int]:
    return _answer(text, lambda: size() and getattr(rt.get_context(), name))


local_rank = _of_context("local_rank", "the index of this rank in its task: ``cuda:{local_rank()}`` is its GPU")
local_size = _of_context("local_world_size", "the number of ranks in this task")
cross_rank = _of_context("node_rank", "the index of this rank's task")
cross_size = _of_context("num_nodes", "the number of tasks")
is_homogeneous = _answer("1, since every task has the same number of ranks", lambda: size() > 0)
gloo_built = gloo_enabled = _answer("1 if torch has gloo, else 0", dist.is_gloo_available)
nccl_built = _answer("1 if torch has NCCL, else 0", dist.is_nccl_available)
cuda_built = _answer("1 if torch has CUDA, else 0", lambda: torch.version.cuda is not None)
rocm_built = _answer("1 if torch has ROCm, else 0", lambda: torch.version.hip is not None)
mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _answer("0: it is not supported", lambda: 0)
