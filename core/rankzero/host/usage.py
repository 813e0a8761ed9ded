"""Counts the cores that this process may use, and samples what of this host is in use.

A sample reads a few small files of the kernel. GPUs are queried by NVIDIA's management library, which does not open
them. Values that the system does not have (macOS) are left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

USAGE_FIRST_SAMPLE = 1.0  # Seconds until the first sample of a host
USAGE_INTERVAL_MIN = 5.0  # Least seconds between two samples
USAGE_INTERVAL_MAX = 60.0  # Most seconds between two samples
_SHARE = 100  # The part of a run's time between two samples

GROUPS = "/sys/fs/cgroup"
_PAGE_OF_MEMINFO = 1024


def available_cores() -> int:
    """Returns the number of cores that this process may use; a container's quota of 2.5 cores counts as three."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(affinity, _quota() or affinity)


def _quota() -> int | None:
    """Returns the cores of this container's quota, from control groups of version 2."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, _read(f"{GROUPS}/cpu.max").split())
        return math.ceil(quota / period)
    return None


class UsageSampler:
    """Samples this host at increasing intervals. A failing GPU may block a sample for minutes."""

    def __init__(self, *, use_gpu: bool, now: float) -> None:
        self._began = self._sampled = now
        self.next_at = now + USAGE_FIRST_SAMPLE
        """Monotonic time of the next sample."""
        self._gpus = _management_library() if use_gpu else None
        self._busy = _busy_seconds()

    def sample(self, now: float) -> dict[str, Any]:
        """Samples this host now.

        Returns:
            ``time`` (Unix), ``cpu`` (busy cores since the last sample), ``cores``, ``memory`` and ``memory_total``
            (bytes), ``gpus``: for each GPU ``use`` (0 to 1), ``memory`` and ``memory_total``, or None if it failed.
        """
        seconds, self._sampled = max(1e-3, now - self._sampled), now
        self.next_at = now + min(USAGE_INTERVAL_MAX, max(USAGE_INTERVAL_MIN, (now - self._began) / _SHARE))
        sample: dict[str, Any] = {"time": time.time(), "cores": os.cpu_count() or 1}
        busy = _busy_seconds()
        if busy is not None and self._busy is not None:
            sample["cpu"] = round(max(0.0, busy - self._busy) / seconds, 3)
        self._busy = busy
        if memory := _memory():
            sample |= {"memory": memory[0], "memory_total": memory[1]}
        if self._gpus:
            sample["gpus"] = _query(self._gpus)
        return sample


def _busy_seconds() -> float | None:
    """Returns the busy seconds of all cores together since the boot."""
    with contextlib.suppress(OSError, ValueError):
        user, nice, system, _, _, irq, softirq, *_ = map(int, _read("/proc/stat").splitlines()[0].split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return None


def _memory() -> tuple[int, int] | None:
    """Returns the used and total bytes of memory: of the container if it has a limit, else of the host."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        # "max" is no number. Cached files can be dropped at any time, so they do not count as used.
        limit = int(_read(f"{GROUPS}/memory.max"))
        facts = dict(line.split() for line in _read(f"{GROUPS}/memory.stat").splitlines())
        return int(_read(f"{GROUPS}/memory.current")) - int(facts["inactive_file"]), limit
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts = dict(line.split()[:2] for line in _read("/proc/meminfo").splitlines())
        total, available = (int(facts[name]) * _PAGE_OF_MEMINFO for name in ("MemTotal:", "MemAvailable:"))
        return total - available, total
    return None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _management_library() -> Any:
    """Returns NVIDIA's management library, which needs no context on a GPU; None if it is not installed."""
    # Few processes have GPUs to sample.
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    return None


def _query(library: Any) -> list[dict[str, Any] | None]:
    import ctypes

    found: list[dict[str, Any] | None] = []
    count, device = ctypes.c_uint(), ctypes.c_void_p()
    use, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        has_failed = (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            or library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use))
            or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        )
        found.append(None if has_failed else {"use": use[0] / 100, "memory": memory[2], "memory_total": memory[0]})
    return found
