"""Maps local files into memory. A mapping keeps no file descriptor, so a process can map every file of a dataset."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from typing import Any

_NO_RESERVE = 0x40 if sys.platform == "darwin" else 0x4000
"""The flag MAP_NORESERVE, for which some versions of Python have no name."""

_FAILED = ctypes.c_void_p(-1).value


def shared(path: str) -> Any:
    """Returns a mapped file as a read-only `pyarrow.Buffer`."""
    import pyarrow as pa

    with pa.memory_map(path) as file:
        return file.read_buffer()


def read_ahead(address: int, size: int) -> None:
    """Tells the kernel to read the pages of a part of a mapping, and returns without waiting for them."""
    if size:
        begin = address - address % mmap.PAGESIZE
        _libc().madvise(begin, address + size - begin, mmap.MADV_WILLNEED)


def private(path: str) -> Any:
    """Returns a mapped file as a writable `pyarrow.Buffer`. Written pages are copied; the file does not change.

    No memory is reserved for the copies, so the file may be larger than the machine's memory. Python's `mmap` is not
    used, since each of its mappings keeps a file descriptor.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    import pyarrow as pa

    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    memory = (ctypes.c_char * size).from_address(address)
    # A thread may still read from it while the interpreter ends.
    weakref.finalize(memory, _libc().munmap, address, size).atexit = False
    return pa.py_buffer(memory)


@functools.cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    integers = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *integers]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
