"""What ranks send each other in a round of a `Coordinator`: which operations they have newly issued."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

INLINE = 64
"""Bytes of a tensor that travels in the round itself."""

_HEAD = struct.Struct("<IBHHI")
"""Bytes of the message, flags, count of numbers, count of inline tensors, bytes of the text."""

_INLINE = struct.Struct("<IB")
"""Number and bytes of a tensor."""


@dataclass(frozen=True)
class Meta:
    """What must be the same on all ranks for a name.

    Attributes:
        kind: ``"allreduce"``, ``"allgather"``, ``"broadcast"``, ``"alltoall"`` or ``"barrier"``.
        dtype: Of the tensor, as text.
        shape: Of the tensor; without the first dimension where that may differ.
        op: Of a reduction.
        root: Rank within the set that broadcasts.
        before: Factor before a reduction.
        after: Factor after a reduction.
        device: Type of the tensor's device.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = 0
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"

    def describe(self) -> str:
        """For a message."""
        words = [self.kind, self.op, self.dtype, str(list(self.shape)), "" if self.device == "cpu" else self.device]
        if self.kind == "broadcast":
            words.append(f"of rank {self.root}")
        return " ".join(word for word in words if word)


@dataclass
class Handle:
    """An operation on its way."""

    name: str
    result: Any = None
    error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        """It has succeeded or failed."""
        return self._done.is_set()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Ends it."""
        self.result, self.error = result, error
        self._done.set()


@dataclass
class Request:
    """One rank's part of an operation.

    Attributes:
        name: By which ranks find each other.
        meta: What must be the same on all.
        tensor: This rank's; a reduction and a broadcast overwrite it.
        splits: Rows for each rank, of an alltoall.
    """

    name: str
    meta: Meta
    tensor: torch.Tensor
    splits: list[int] | None = None
    handle: Handle = field(init=False)

    def __post_init__(self) -> None:
        self.handle = Handle(self.name)

    @property
    def is_tiny(self) -> bool:
        """Its data may travel in the round."""
        tensor = self.tensor
        return self.meta.kind == "allreduce" and tensor.nbytes <= INLINE and tensor.device.type == "cpu"


@dataclass(frozen=True)
class Said:
    """What a rank sent.

    Attributes:
        flags: Of the coordinator.
        issued: Numbers of what it has newly issued.
        inline: The data of tiny tensors, by number.
    """

    flags: int
    issued: list[int]
    inline: dict[int, bytes]


class Numbers:
    """Short numbers for names with their `Meta`, the same on all ranks."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Meta]] = []
        self._numbers: dict[tuple[str, Meta], int] = {}

    def __getitem__(self, number: int) -> tuple[str, Meta]:
        return self._known[number]

    def encode(self, flags: int, new: Sequence[Request]) -> bytes:
        """The message of a rank that has newly issued ``new``."""
        numbers: list[int] = []
        fresh: list[list[Any]] = []
        inline: list[bytes] = []
        for request in new:
            number = self._numbers.get((request.name, request.meta))
            if number is None:
                meta = request.meta
                fresh.append(
                    [
                        request.name,
                        meta.kind,
                        meta.dtype,
                        meta.shape,
                        meta.op,
                        meta.root,
                        meta.before,
                        meta.after,
                        meta.device,
                    ]
                )
                continue
            numbers.append(number)
            if request.is_tiny:
                data = bytes_of(request.tensor)
                inline.append(_INLINE.pack(number, len(data)) + data)
        text = json.dumps(fresh).encode() if fresh else b""
        body = struct.pack(f"<{len(numbers)}I", *numbers) + b"".join(inline) + text
        return _HEAD.pack(_HEAD.size + len(body), flags, len(numbers), len(inline), len(text)) + body

    def decode(self, message: bytes) -> Said:
        """What a rank sent. Called for the messages of a round in the order of ranks, so that all number alike."""
        _, flags, count, inlined, length = _HEAD.unpack_from(message)
        offset = _HEAD.size
        numbers = list(struct.unpack_from(f"<{count}I", message, offset))
        offset += 4 * count
        inline = {}
        for _ in range(inlined):
            number, size = _INLINE.unpack_from(message, offset)
            offset += _INLINE.size
            inline[number] = message[offset : offset + size]
            offset += size
        for name, kind, dtype, shape, *others in json.loads(message[offset : offset + length] or "[]"):
            key = name, Meta(kind, dtype, tuple(shape), *others)
            if key not in self._numbers:
                self._numbers[key] = len(self._known)
                self._known.append(key)
            numbers.append(self._numbers[key])
        return Said(flags, numbers, inline)


def length_of(message: bytes) -> int:
    """Bytes of a message, of which this is the begin."""
    return int(_HEAD.unpack_from(message)[0])


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor from its bytes."""
    return torch.frombuffer(bytearray(data), dtype=dtype)
