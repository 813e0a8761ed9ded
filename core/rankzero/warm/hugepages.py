"""Gathers the memory of a process that is going to fork often in huge pages.

A fork copies the page tables of its parent, and takes its own down when it ends. With torch loaded that is fifty
thousand entries; in huge pages it is some thousand. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

HUGE_PAGE = 2 << 20
"""Bytes. Where a system's huge pages are larger, it refuses to make one of these, and nothing is lost."""

DENSE = 0.9
"""Share of a mapping that must be in memory already: to gather a sparse one would fill its holes."""

# linux/mman.h; since Linux 6.1. It does not ask what the system's settings are.
_MADV_COLLAPSE = 25

_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"

# proc(5), smaps: a line with addresses, permissions, offset, device, inode and name, then others.
_ANONYMOUS = r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$"
_MAPPING = re.compile(_ANONYMOUS + r"\nSize: +(\d+) kB\n(?:.*\n){,4}?Rss: +(\d+) kB$", re.MULTILINE)


def gather(is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Collapses the dense private memory of this process; what the kernel refuses stays as it is.

    Args:
        is_wanted: Asked before each range, which takes some milliseconds; the rest is left when it gives False.

    Raises:
        OSError: Not a Linux with huge pages.
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
    """Addresses of ranges that a huge page would fit, in anonymous memory."""
    with open("/proc/self/smaps", errors="replace") as file:
        described = file.read()
    for found in _MAPPING.finditer(described):
        start, end = int(found[1], 16), int(found[2], 16)
        if int(found[4]) >= DENSE * int(found[3]):
            first = -(-start // HUGE_PAGE) * HUGE_PAGE
            yield from range(first, end - HUGE_PAGE + 1, HUGE_PAGE)
