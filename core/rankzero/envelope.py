"""A pickle in a file with its large buffers beside it: written without a copy in memory, mapped where it is loaded.

    8 bytes   length of the header
    header    JSON: offset and size of the pickle, then of each of its out-of-band buffers (pickle protocol 5)
    content   each part at a multiple of 64 bytes

What is unpickled carries a sha256. The buffers beside it are numbers, which run no code: against damage a CRC-32 does,
and takes an eighth of the time.

Runs inside workers too: standard library and torch only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LARGE = 1 << 20
"""Bytes from which a buffer lies beside the pickle."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_READ = 1 << 20

_UNPICKLED_PARTS = 3
"""Of what `seal` makes: header, pickle, padding."""

Part = bytes | memoryview


def beside(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """A pickler's ``buffer_callback`` that takes large contiguous buffers out of the pickle, into ``buffers``."""

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


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """How a large tensor in the CPU's memory is pickled, so that its numbers lie beside; None for any other."""
    import torch

    plain = (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.is_leaf
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not (tensor._backward_hooks or tensor.__dict__)
    )
    size = tensor.numel() * tensor.element_size() if plain else 0
    if size < LARGE:
        return None
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    # The memory is the tensor's.
    memory.owner = tensor  # type: ignore[attr-defined]
    return make_tensor, (pickle.PickleBuffer(memory), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def make_tensor(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """The tensor of `reduce_tensor`; its memory is the buffer."""
    import torch

    return torch.frombuffer(buffer, dtype=dtype).reshape(shape).requires_grad_(requires_grad)


def seal(pickled: bytes, buffers: Sequence[memoryview]) -> list[Part]:
    """The parts of the file, one after the other; the buffers are not copied."""
    contents: list[Part] = [pickled, *buffers]
    sizes = [len(content) for content in contents]
    # Offsets are longer with a longer header, so it gets more room than it needs.
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


def checksums(parts: Sequence[Part]) -> dict[str, Any]:
    """What `is_intact` compares; of any file's parts.

    Returns:
        ``sha256`` (hex) of the first ``hashed`` bytes, ``crc32`` of the others.
    """
    unpickled, rest = parts[:_UNPICKLED_PARTS], parts[_UNPICKLED_PARTS:]
    digest, crc = hashlib.sha256(), 0
    for part in unpickled:
        digest.update(part)
    for part in rest:
        crc = zlib.crc32(part, crc)
    return {"sha256": digest.hexdigest(), "hashed": sum(map(len, unpickled)), "crc32": crc}


def is_intact(path: str, facts: dict[str, Any]) -> bool:
    """True if a file is the one of which `checksums` said this."""
    digest, crc, left = hashlib.sha256(), 0, facts["hashed"]
    with open(path, "rb") as file:
        while left and (data := file.read(min(left, _READ))):
            digest.update(data)
            left -= len(data)
        while data := file.read(_READ):
            crc = zlib.crc32(data, crc)
    return bool(digest.hexdigest() == facts["sha256"] and crc == facts["crc32"])


def open_sealed(path: str) -> Any:
    """Loads what `seal` made: arrays are mapped copy-on-write, and read when they are used."""
    with open(path, "rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (length,) = _LENGTH.unpack_from(mapped)
    places = json.loads(bytes(mapped[_LENGTH.size : _LENGTH.size + length]))
    pickled, *buffers = (mapped[offset : offset + size] for offset, size in places)
    return pickle.loads(pickled, buffers=buffers)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
