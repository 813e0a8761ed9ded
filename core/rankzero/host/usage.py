"""Counts the cores that this process may use, and samples what of this host is in use.

The cores are those of the affinity of this process and of the quotas of its control groups. A sample of processors,
memory, network and GPUs reads a few small files of the kernel: some 0.06 ms of processor time (`benchmarks/usage.py`).
GPUs are queried by NVIDIA's management library, which does not open them.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

USAGE_FIRST_SAMPLE = 1.0  # Seconds until the first sample of a host
USAGE_INTERVAL_MIN = 5.0  # Least seconds between two samples
USAGE_INTERVAL_MAX = 60.0  # Most seconds between two samples

GROUPS = "/proc/self/cgroup"
MOUNT = "/sys/fs/cgroup"


def available_cores() -> int:
    """Returns the number of cores that this process may use; a quota of 2.5 cores counts as three, as in a JVM."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *_quotas()])


def _quotas() -> Iterator[int]:
    """Yields the quotas, in cores, of this process's control group and of its visible parents."""
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError):
            quota, period = _limit(folder)
            if quota > 0:
                yield math.ceil(quota / period)


def _folders() -> Iterator[str]:
    with contextlib.suppress(OSError), open(GROUPS) as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = os.path.join(MOUNT, "cpu") if controllers else MOUNT
            # In a container the path may be the host's while the container's own group is mounted: read its root, too.
            while path.strip("/"):
                yield root + path
                path = os.path.dirname(path)
            yield root


def _limit(folder: str) -> tuple[int, int]:
    """Returns the microseconds of a quota and its period, from control groups of version 2, else version 1.

    Raises:
        OSError: the group does not exist.
        ValueError: the group has no quota.
    """
    if os.path.exists(unified := os.path.join(folder, "cpu.max")):
        allowed, each = _read(unified).split()
        return int(allowed), int(each)
    files = (os.path.join(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    quota, period = (int(_read(file)) for file in files)
    return quota, period


_SHARE = 100
_PAGE_OF_MEMINFO = 1024


class UsageSampler:
    """Samples this host at increasing intervals. Counters that the system does not have (macOS) are left out."""

    def __init__(self, *, use_gpu: bool, now: float) -> None:
        self._began = self._sampled = now
        self.next_at = now + USAGE_FIRST_SAMPLE
        """Monotonic time of the next sample."""
        self._gpus = _Gpus() if use_gpu else None
        self._busy, self._bytes = _busy_seconds(), _network_bytes()

    def sample(self, now: float) -> dict[str, Any] | None:
        """Takes a sample if one is due.

        Returns:
            ``time`` (Unix), ``cpu`` (busy cores since the last sample), ``cores``, ``memory`` and ``memory_total``
            (bytes), ``received`` and ``sent`` (bytes a second), ``gpus``: for each GPU ``use`` (0 to 1), ``memory`` and
            ``memory_total`` (bytes) at the sample before, or None if it failed. Unavailable values are left out.
            None if no sample is due.
        """
        if now < self.next_at:
            return None
        seconds, self._sampled = max(1e-3, now - self._sampled), now
        self.next_at = now + min(USAGE_INTERVAL_MAX, max(USAGE_INTERVAL_MIN, (now - self._began) / _SHARE))
        sample: dict[str, Any] = {"time": time.time(), "cores": os.cpu_count() or 1}
        busy, moved = _busy_seconds(), _network_bytes()
        if busy is not None and self._busy is not None:
            sample["cpu"] = round(max(0.0, busy - self._busy) / seconds, 3)
        if moved and self._bytes:
            received, sent = (max(0, after - before) for after, before in zip(moved, self._bytes, strict=True))
            sample |= {"received": round(received / seconds), "sent": round(sent / seconds)}
        self._busy, self._bytes = busy, moved
        if memory := _memory():
            sample |= {"memory": memory[0], "memory_total": memory[1]}
        if self._gpus and (gpus := self._gpus.sample()):
            sample["gpus"] = gpus
        return sample


def _busy_seconds() -> float | None:
    """Returns the busy seconds of all cores together since the boot."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return None


def _memory() -> tuple[int, int] | None:
    """Returns the used and total bytes of memory: of the container if it has a limit, else of the host."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = _read("/sys/fs/cgroup/memory.max").strip()
        if limit != "max":
            facts = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
            # Cached files can be dropped at any time, so they do not count as used.
            return int(_read("/sys/fs/cgroup/memory.current")) - int(facts["inactive_file"]), int(limit)
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in _read("/proc/meminfo").splitlines())
        facts = {words[0].rstrip(":"): words[1] for words in lines if len(words) > 1}
        total = int(facts["MemTotal"]) * _PAGE_OF_MEMINFO
        return total - int(facts["MemAvailable"]) * _PAGE_OF_MEMINFO, total
    return None


def _network_bytes() -> tuple[int, int] | None:
    """Returns the bytes received and sent since the boot by all interfaces except loopback."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        received = sent = 0
        for line in _read("/proc/net/dev").splitlines()[2:]:
            name, _, counts = line.partition(":")
            if name.strip() != "lo":
                words = counts.split()
                received, sent = received + int(words[0]), sent + int(words[8])
        return received, sent
    return None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


class _Gpus:
    """NVIDIA's management library, if it is installed; it needs no context on a GPU.

    A thread queries it: a failing GPU may block the query for minutes, and the agent's loop must not block.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._newest: list[dict[str, Any] | None] = []
        self._thread: threading.Thread | None = None
        # Few processes have GPUs to sample.
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library

    def sample(self) -> list[dict[str, Any] | None]:
        """Returns the result of the last query, by index with None for a GPU that failed, and starts the next query."""
        found, self._newest = self._newest, []
        if self._library is not None and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._query_all, name="rankzero-gpus", daemon=True)
            self._thread.start()
        return found

    def _query_all(self) -> None:
        import ctypes

        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            self._newest = [self._query(index) for index in range(count.value)]

    def _query(self, index: int) -> dict[str, Any] | None:
        import ctypes

        device, use, memory = ctypes.c_void_p(), (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            return None
        if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)):
            return None
        if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        return {"use": use[0] / 100, "memory": memory[2], "memory_total": memory[0]}
