"""Counts the cores that this process may use, by its affinity and the quotas of its control groups."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

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


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
