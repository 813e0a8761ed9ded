"""How many cores this process may use: by its affinity, and by the quotas of its control groups, as of a container."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

GROUPS = "/proc/self/cgroup"
MOUNT = "/sys/fs/cgroup"


def available_cores() -> int:
    """Cores that this process may use; of a quota of 2.5 cores three, as a JVM counts."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *_quotas()])


def _quotas() -> Iterator[int]:
    """Those that count for this process: of its own control group, and of those above that it sees."""
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
            # In a container the path may be the host's, and what is mounted the container's own: its root counts too.
            while path.strip("/"):
                yield root + path
                path = os.path.dirname(path)
            yield root


def _limit(folder: str) -> tuple[int, int]:
    """Microseconds of a quota and its period, by the second version of control groups, else the first.

    Raises:
        OSError: there is no such group.
        ValueError: it has no quota.
    """
    if os.path.exists(unified := os.path.join(folder, "cpu.max")):
        allowed, each = _read(unified).split()
        return int(allowed), int(each)
    files = (os.path.join(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    quota, period = (int(_read(file)) for file in files)
    return quota, period


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
