"""A pickle in a file with its large buffers beside it: written without a copy in memory, mapped where it is loaded.

    8 bytes   length of the header
    header    JSON: offset and size of the pickle, then of each of its out-of-band buffers (pickle protocol 5)
    content   each part at a multiple of 64 bytes

Its checksum is one of blocks: as many cores as there are compute and compare it.

Runs inside workers too: standard library and torch only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankzero.host.processes import usable_cores

if TYPE_CHECKING:
    import torch

LARGE = 1 << 20
"""Bytes from which a buffer lies beside the pickle."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_BLOCK = 8 << 20
"""Bytes of a block, of which one core computes the checksum."""

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
    """How a large tensor in the CPU's memory is pickled, so that its numbers lie beside; None for any other.

    Args:
        tensor: Of no subclass, which may have more to it.
    """
    import ctypes

    try:
        size = tensor.numel() * tensor.element_size() if _is_plain(tensor) else 0
    except RuntimeError:
        # One of the kinds of tensors that do not have all that others have.
        return None
    if size < LARGE:
        return None
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    # The memory is the storage's, whatever becomes of the tensor meanwhile.
    memory.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return make_tensor, (pickle.PickleBuffer(memory), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if dtype, shape and numbers are all there is to it."""
    import torch

    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not (tensor._is_zerotensor() or any(getattr(tensor, "names", ())))
        and tensor.is_contiguous()
        and tensor.is_leaf
        and not (tensor._backward_hooks or tensor.__dict__)
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    )


def make_tensor(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """The tensor of `reduce_tensor`; its memory is the buffer, and so it cannot be resized."""
    import torch

    return torch.frombuffer(buffer, dtype=dtype).reshape(shape).requires_grad_(requires_grad)


def pack(pickled: bytes, buffers: Sequence[memoryview]) -> list[Part]:
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


def checksum(parts: Sequence[Part]) -> str:
    """The sha256, hex, of the sha512 of every block of a file, which the parts make one after the other.

    Without instructions for either in the processor sha512 is half as fast again as sha256.
    """
    blocks = list(_blocks(parts))
    cores = min(len(blocks), usable_cores())
    if cores < 2:
        return hashlib.sha256(b"".join(map(_hash_block, blocks))).hexdigest()
    from concurrent.futures import ThreadPoolExecutor

    # Large updates leave the interpreter's lock.
    with ThreadPoolExecutor(cores, "rankzero-digest") as pool:
        return hashlib.sha256(b"".join(pool.map(_hash_block, blocks))).hexdigest()


def checksum_of_file(path: str) -> str:
    """What `checksum` gave of its parts. Raises OSError; ValueError for an empty file."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return checksum([view])


def _blocks(parts: Sequence[Part]) -> Iterator[list[memoryview]]:
    block: list[memoryview] = []
    room = _BLOCK
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            block.append(view[:room])
            view, room = view[room:], room - block[-1].nbytes
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block


def _hash_block(block: list[memoryview]) -> bytes:
    digest = hashlib.sha512()
    for piece in block:
        digest.update(piece)
    return digest.digest()


def open_packed(path: str) -> Any:
    """Loads what `pack` made: arrays are mapped copy-on-write, and read when they are used."""
    with open(path, "rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (length,) = _LENGTH.unpack_from(mapped)
    places = json.loads(bytes(mapped[_LENGTH.size : _LENGTH.size + length]))
    pickled, *buffers = (mapped[offset : offset + size] for offset, size in places)
    return pickle.loads(pickled, buffers=buffers)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
