"""The rank of this process, the sets of ranks that communicate, and warnings about ranks that others wait for."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rankzero.train as rt
from rankzero import bounds
from rankzero.compat.horovod.torch.coordinator import Coordinator
from rankzero.compat.horovod.torch.messages import Meta, Request
from rankzero.train.context import at_return

logger = logging.getLogger(__name__)

STALL_WARNING_AFTER = 60.0
STALL_TIMEOUT = 1800.0
STALL_TIMEOUT_MAX = 30 * 24 * 3600.0
"""Horovod's own defaults of its variables for warnings and shutdowns, and the largest value of both, in seconds."""

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class ProcessSet:
    """A set of ranks that communicate with each other.

    Args:
        ranks: Global ranks of the set.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(set(ranks))
        self.process_set_id: int | None = None
        self._coordinator: Coordinator | None = None

    @property
    def coordinator(self) -> Coordinator:
        """Returns the coordinator that executes the set's operations. Raises ValueError before it is created."""
        if self._coordinator is None:
            raise ValueError(NOT_INITIALIZED if self is global_process_set else "give it to hvd.add_process_set first")
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
        warn_after = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", STALL_WARNING_AFTER)
        timeout = timedelta(seconds=_seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", STALL_TIMEOUT))
        self.process_set_id = number
        self._coordinator = Coordinator(self.ranks, timeout, warn_after)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or "0"
    try:
        found = float(text)
    except ValueError:
        found = -1
    if not 0 <= found <= STALL_TIMEOUT_MAX:
        raise ValueError(f"{name} is {text!r}; give seconds, or 0 for {default:.0f}")
    return found or default


class Watcher:
    """Logs warnings about ranks for which this rank has waited long, in a thread, until it is stopped.

    Args:
        sets: Returns the current sets of ranks.
    """

    def __init__(self, sets: Callable[[], Sequence[Coordinator]]) -> None:
        self._sets = sets
        self._warn_at: dict[Coordinator, float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="rankzero-horovod-stalls", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread without waiting for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(bounds.POLL_INTERVAL_LONGEST):
            for group in self._sets():
                if group.stall() >= bounds.POLL_INTERVAL_LONGEST:
                    self._check(group)
                else:
                    self._warn_at.pop(group, None)

    def _check(self, group: Coordinator) -> None:
        found, stall = group.call_roll(), group.stall()
        if stall >= self._warn_at.setdefault(group, group.warn_after):
            self._warn_at[group] = stall + group.warn_after
            print(f"rankzero: {found}", flush=True)


global_process_set = ProcessSet([])
_sets: dict[int, ProcessSet] = {}
_ended: list[Coordinator] = []
"""What the last `shutdown` has closed."""
_watcher: Watcher | None = None
_world: Any = None
"""torch's process group when this process became a rank."""


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Makes this process a rank, and creates torch's process group if there is none. A second call does nothing.

    Args:
        comm: None, or all ranks; use `ProcessSet` for subsets.
        process_sets: Further sets, as for `add_process_set`.

    Raises:
        ValueError: ``comm`` is an MPI communicator or a part of the ranks.
        HorovodInternalError: an operation has failed in this rank alone before `shutdown`, and others still wait in it.
    """
    global _watcher, _world
    if is_initialized():
        return
    for ended in _ended:
        ended.await_peers()
    _ended.clear()
    # Removes the sets of an earlier training of this process that failed.
    _forget()
    rt.ensure_process_group()
    _world = dist.group.WORLD
    everybody = list(range(dist.get_world_size()))
    if comm is not None and (not isinstance(comm, (list, tuple)) or sorted(comm) not in ([], everybody)):
        raise ValueError(f"comm is {comm!r}; MPI communicators are not supported: use hvd.add_process_set(ranks)")
    global_process_set.ranks = everybody
    global_process_set._open(0)
    _sets[0] = global_process_set
    at_return(_end)
    _watcher = Watcher(lambda: [one for each in list(_sets.values()) if (one := each._coordinator)])
    if not isinstance(process_sets, str):
        for process_set in process_sets or ():
            add_process_set(process_set)


def shutdown() -> None:
    """Ends this rank's part once all ranks end theirs; operations that still wait for this rank fail on other ranks."""
    for coordinator in _end():
        coordinator.destroy()
        _ended.append(coordinator)


def _end() -> list[Coordinator]:
    """Ends this rank's part, but keeps its connections until the process exits."""
    found = [process_set.coordinator for process_set in _sets.values()]
    for coordinator in found:
        coordinator.end()
    if len(found) > 1:
        # Ranks may wait for this rank in one set while it waits for ranks of another set.
        for coordinator in found:
            if coordinator.rank >= 0:
                coordinator.drive()
    for coordinator in found:
        coordinator.await_end()
    _forget()
    return found


def _forget() -> None:
    global _watcher
    for process_set in _sets.values():
        process_set._coordinator = None
    _sets.clear()
    if _watcher:
        _watcher.stop()
        _watcher = None


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`, or the end of torch's process group."""
    return global_process_set._coordinator is not None and dist.is_initialized() and dist.group.WORLD is _world


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set of ranks able to communicate. Every rank must call it, with the same sets in the same order.

    Raises:
        ValueError: a rank does not exist, or a set of these ranks exists already.
        MismatchError: the ranks gave different sets.
    """
    everybody = global_process_set.coordinator.ranks
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not found.ranks or not set(found.ranks) <= set(everybody):
        raise ValueError(f"process set {found.ranks} has ranks that do not exist; there are {len(everybody)}")
    if any(found.ranks == other.ranks for other in _sets.values()):
        raise ValueError(f"a process set of the ranks {found.ranks} is there already")
    # Ranks that create different groups would block each other; this barrier detects and names them.
    agreed = global_process_set.coordinator
    agreed.wait(
        agreed.requests.issue(
            Request(
                "process_set", max(_sets) + 1, Meta("barrier", shape=tuple(found.ranks)), torch.empty(0, device="cpu")
            )
        )
    )
    found._open(max(_sets) + 1)
    _sets[max(_sets) + 1] = found
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; returns False for an unknown set and for the global one. Every rank must call it."""
    if process_set is global_process_set or process_set not in _sets.values():
        return False
    process_set.coordinator.end()
    process_set.coordinator.await_end()
    process_set.coordinator.destroy()
    del _sets[process_set.process_set_id or 0]
    process_set._coordinator = process_set.process_set_id = None
    return True


def process_set_ids() -> list[int]:
    """Returns the ids of all process sets."""
    return list(_sets)


def rank() -> int:
    """Returns the global rank of this process."""
    return global_process_set.coordinator.rank


def size() -> int:
    """Returns the number of ranks."""
    return global_process_set.coordinator.size


def local_rank() -> int:
    """Returns the index of this rank in its task: ``cuda:{local_rank()}`` is its GPU, wherever ranks are placed."""
    size()
    return rt.get_context().local_rank


def local_size() -> int:
    """Returns the number of ranks in this task."""
    size()
    return rt.get_context().local_world_size


def cross_rank() -> int:
    """Returns the index of this rank's task."""
    size()
    return rt.get_context().node_rank


def cross_size() -> int:
    """Returns the number of tasks."""
    size()
    return rt.get_context().num_nodes


def is_homogeneous() -> bool:
    """Returns True, since every task has the same number of ranks."""
    size()
    return True


def gloo_built() -> bool:
    """Returns True if torch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Returns True if torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Returns the version of NCCL that torch has; 0 if it has none."""
    if not dist.is_nccl_available():
        return 0
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version if isinstance(version, int) else version[0] * 10000 + version[1] * 100 + version[2]


def cuda_built() -> bool:
    """Returns True if torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Returns True if torch has ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Returns False, since ranks communicate without MPI."""
    return False


def mpi_enabled() -> bool:
    """Returns False, since ranks communicate without MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False, since ranks communicate without MPI."""
    return False


def ddl_built() -> bool:
    """Returns False, since IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Returns False, since Intel's oneCCL is not supported."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Only logs a warning: use `torch.profiler` instead."""
    logger.warning("hvd.start_timeline(%r) writes no timeline: use torch.profiler.profile", file_path)


def stop_timeline() -> None:
    """Does nothing, since there is no timeline."""
