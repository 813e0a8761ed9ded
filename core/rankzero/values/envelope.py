"""A file with a pickle and its large buffers: written without a copy in memory, and mapped where it is loaded.

    8 bytes   length of the header
    header    JSON: offset and size of the pickle, then of each of its out-of-band buffers (pickle protocol 5)
    content   each part at a multiple of 64 bytes

Runs inside workers too: standard library only.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

LARGE = 64 << 10
"""Bytes from which on a buffer is stored outside of the pickle."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64

Part = bytes | memoryview


def beside(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """Returns a pickler's ``buffer_callback`` that moves large contiguous buffers from the pickle into ``buffers``."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:
            return True
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    return take


def pack(pickled: Part, buffers: Sequence[memoryview]) -> list[Part]:
    """Returns the parts of the file in their order; the buffers are not copied."""
    contents: list[Part] = [pickled, *buffers]
    sizes = [len(content) for content in contents]
    # The header's length depends on the offsets, and these on the header's length: it gets more room than it needs.
    room = _padded(_LENGTH.size + 48 * len(contents))
    places, offset = [], room
    for size in sizes:
        places.append([offset, size])
        offset += _padded(size)
    header = json.dumps(places).encode()
    parts: list[Part] = [(_LENGTH.pack(len(header)) + header).ljust(room, b"\0")]
    for content, size in zip(contents, sizes, strict=True):
        parts += [content, bytes(_padded(size) - size)]
    return parts


def open_packed(path: str | int, unpickler: type[pickle.Unpickler] = pickle.Unpickler) -> Any:
    """Loads a file that `pack` made: large buffers are mapped copy-on-write, and read when they are used.

    Args:
        path: The file, or the descriptor of an open one. The mapping remains valid if the file is deleted.
        unpickler: The class that loads the pickle.
    """
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (length,) = _LENGTH.unpack_from(mapped)
    places = json.loads(bytes(mapped[_LENGTH.size : _LENGTH.size + length]))
    pickled, *buffers = (mapped[offset : offset + size] for offset, size in places)
    return unpickler(io.BytesIO(pickled), buffers=buffers).load()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
