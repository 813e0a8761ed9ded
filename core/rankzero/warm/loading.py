"""Loads what forks of the warm server share, and moves its memory into huge pages.

A fork copies the page tables of its parent. With torch loaded these are 50,000 entries; with huge pages some 1,000.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rankzero import bounds
from rankzero.host import forked

WARM_PRELOAD_TIMEOUT = bounds.stretched(5.0)  # For the modules of RANKZERO_PRELOAD: a launch waits meanwhile

PRELOADED = (
    "encodings.idna",
    "torch",
    "torch.distributed",
    "rankzero.worker.main",
    "rankzero.compat",
    "rankzero.store.remote",
    "rankzero.train.parts",
    "rankzero.train.writer",
    "rankzero.values.formats",
    "rankzero.values.ref",
    "rankzero.train",
)
PRELOADED_LATER = (
    "torch._dynamo",
    # Imported by most modules that hold a training function: 40 ms or more of processor time in every rank.
    "rankzero.launcher",
    "rankzero.engines.local",
    "rankzero.engines.spark.engine",
)
PRELOAD = "RANKZERO_PRELOAD"
"""Environment variable with the names of further installed modules, separated by commas, that a server loads later."""

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


give_up_at = math.inf
"""Monotonic time at which `rankzero.warm.server.ending_with` ends the import that hangs."""


def load(names: Sequence[str], users: Sequence[str] = ()) -> None:
    """Imports modules that the forks share.

    Directories of the user's ``PYTHONPATH`` are not searched, unless torch itself is there.

    Args:
        names: Names of the modules.
        users: Modules that the user has named, one of which may hang: all of them get `WARM_PRELOAD_TIMEOUT`.
    """
    global give_up_at
    # Garbage collection during the imports took a tenth of the time.
    gc.disable()
    path = sys.path
    own = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = [place for place in path if place not in own]
    if importlib.machinery.PathFinder.find_spec("torch", installed):
        sys.path = installed
    try:
        for name in names:
            # Modules may exit, or raise as a test that is skipped does.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        end = time.monotonic() + WARM_PRELOAD_TIMEOUT()
        for name in filter(None, map(str.strip, users)):
            try:
                give_up_at = end
                importlib.import_module(name)
            except BaseException as error:
                why = f"within {WARM_PRELOAD_TIMEOUT():g} s" if time.monotonic() >= end else f"({error!r})"
                sys.stderr.write(f"rankzero: {PRELOAD}: {name} was not imported {why}; ranks import it themselves\n")
                sys.stderr.flush()
            finally:
                give_up_at = math.inf
        sys.path = path
        forked.prepare()
    finally:
        sys.path = path
        gc.enable()


def settle_dynamo() -> None:
    """Does once the work that torch._dynamo would do in every fork, even if the fork compiles nothing."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if clear := getattr(rules, "clear_lru_cache", None):
        # init_process_group does it, too: results that were cached during the import may be wrong.
        clear()
    utils: Any = sys.modules.get("torch._dynamo.utils")
    dump, log = getattr(utils, "dump_compile_times", None), getattr(utils, "log", None)
    if dump and isinstance(log, logging.Logger):
        # Its exit handler formats a table before it checks whether the log level shows it.
        atexit.unregister(dump)
        atexit.register(lambda: dump() if log.isEnabledFor(logging.INFO) else None)


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
