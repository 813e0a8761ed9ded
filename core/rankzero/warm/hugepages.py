"""Moves the memory of a process that forks often into huge pages.

A fork copies the page tables of its parent, and frees its own when it exits. With torch loaded these are 50,000
entries; with huge pages some 1,000. Standard library only: this module is shipped to executors.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

HUGE_PAGE = 2 << 20
"""Bytes of a huge page. A system with larger ones rejects the request, and the memory stays unchanged."""

DENSE = 0.9
"""Share of a mapping that must be resident: to collapse a sparse one would allocate its holes."""

# linux/mman.h; since Linux 6.1. It ignores the system's setting for huge pages.
_MADV_COLLAPSE = 25

_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"

# proc(5), smaps: a line with addresses, permissions, offset, device, inode and name, then others.
_ANONYMOUS = r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$"
_MAPPING = re.compile(_ANONYMOUS + r"\nSize: +(\d+) kB\n(?:.*\n){,4}?Rss: +(\d+) kB$", re.MULTILINE)


def gather(is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Collapses the dense private memory of this process into huge pages, except ranges that the kernel rejects.

    Args:
        is_wanted: Called before each range, which takes some milliseconds; stops when it returns False.

    Raises:
        OSError: the system is not a Linux with huge pages.
    """
    with open(_SETTING) as file:
        if "[never]" in file.read():
            return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address in _candidates():
        if not is_wanted():
            return
        madvise(address, HUGE_PAGE, _MADV_COLLAPSE)


def _candidates() -> Iterator[int]:
    """Yields the addresses of aligned ranges in dense anonymous memory that a huge page could replace."""
    with open("/proc/self/smaps", errors="replace") as file:
        described = file.read()
    for found in _MAPPING.finditer(described):
        start, end = int(found[1], 16), int(found[2], 16)
        if int(found[4]) >= DENSE * int(found[3]):
            first = -(-start // HUGE_PAGE) * HUGE_PAGE
            yield from range(first, end - HUGE_PAGE + 1, HUGE_PAGE)
