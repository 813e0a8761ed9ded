"""What ranks send each other in a round of a `Coordinator`: which operations they have newly issued."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import torch

INLINE = 64
"""Bytes of a tensor that travels in the round itself."""

_ALIGNED = 16
"""Bytes at whose multiples tensors begin, so that they are read where they lie."""

_HEAD = struct.Struct("<IIIHBx")
"""Bytes of the message, bytes of the text, count of operations, count of inline tensors, flags."""

FAILED = 8
"""Flag of a message that says that its rank has failed, and why."""

INLINED = 1 << 12
"""Tensors of one rank that travel in a round at most."""

KNOWN = 1 << 14
"""Names that have numbers: more than a model has parameters. Who makes up new names for ever begins anew then."""

_OPERATION = struct.Struct("<II")
"""Number of the name, and of the call without a name."""


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

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The type of the tensor."""
        found: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return found

    @cached_property
    def inline_bytes(self) -> int:
        """Bytes of the tensor, if it travels in the round; else 0."""
        if self.kind != "allreduce" or self.device != "cpu":
            return 0
        size = math.prod(self.shape) * self.torch_dtype.itemsize
        return size if size <= INLINE else 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def describe(self) -> str:
        """For a message."""
        words = [self.kind, self.op, self.dtype, str(list(self.shape)), "" if self.device == "cpu" else self.device]
        if self.kind == "broadcast":
            words.append(f"of rank {self.root}")
        return " ".join(word for word in words if word)


class Handle:
    """An operation on its way."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        """It has succeeded or failed."""

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Ends it."""
        self.result, self.error = result, error
        self.is_done = True


@dataclass
class Request:
    """One rank's part of an operation.

    Attributes:
        name: By which ranks find each other.
        call: Number of the call, from 1, where the user gave no name; else 0.
        meta: What must be the same on all.
        tensor: This rank's; a reduction and a broadcast overwrite it.
        splits: Rows for each rank, of an alltoall.
    """

    name: str
    call: int
    meta: Meta
    tensor: torch.Tensor
    splits: list[int] | None = None
    handle: Handle = field(default_factory=Handle)

    @property
    def full_name(self) -> str:
        """The name, different for each call."""
        return full_name(self.name, self.call)


@functools.lru_cache(maxsize=10_000)
def meta_of(*values: Any) -> Meta:
    """As the constructor, which takes its time."""
    return Meta(*values)


def full_name(name: str, call: int) -> str:
    """The name of an operation, different for each call without one."""
    return f"{name}.noname.{call}" if call else name


@dataclass(frozen=True)
class Report:
    """What a rank sent.

    Attributes:
        flags: Of the coordinator.
        issued: What it has newly issued, by full name.
        inline: Where the data of tiny tensors begins in the message, by full name.
        failure: Of a rank that has failed: how.
    """

    flags: int
    issued: dict[str, Meta]
    inline: dict[str, int]
    failure: str = ""


class Numbers:
    """Short numbers for names with their `Meta`, the same on all ranks. They hold for one round."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Meta]] = []
        self._numbers: dict[tuple[str, Meta], int] = {}

    def encode(self, flags: int, new: Sequence[Request]) -> bytes:
        """The message of a rank that has newly issued ``new``. Called once in each round, before it is sent."""
        if len(self._known) >= KNOWN:
            # Every rank knows as many at the begin of a round.
            self._known.clear()
            self._numbers.clear()
        operations: list[bytes] = []
        others: list[bytes] = []
        fresh: list[list[Any]] = []
        data: list[bytes] = []
        for request in new:
            number = self._numbers.get((request.name, request.meta))
            if number is None:
                fresh.append([request.name, request.call, *astuple(request.meta)])
            elif request.meta.inline_bytes and len(operations) < INLINED:
                operations.append(_OPERATION.pack(number, request.call))
                data.append(padded(bytes_of(request.tensor)))
            else:
                others.append(_OPERATION.pack(number, request.call))
        text = json.dumps(fresh).encode() if fresh else b""
        count = len(operations) + len(others)
        body = b"".join((padded(b"".join(operations + others)), *data, text))
        return _HEAD.pack(_HEAD.size + len(body), len(text), count, len(operations), flags) + body

    def decode(self, message: memoryview) -> Report:
        """What a rank sent. Called for the messages of a round in the order of ranks, so that all number alike."""
        length, text, count, inlined, flags = _HEAD.unpack_from(message)
        if flags & FAILED:
            return Report(flags, {}, {}, bytes(message[length - text : length]).decode())
        end = _HEAD.size + count * _OPERATION.size
        issued: dict[str, Meta] = {}
        inline: dict[str, int] = {}
        begin = aligned(end)
        for index, (number, call) in enumerate(_OPERATION.iter_unpack(message[_HEAD.size : end])):
            name, meta = self._known[number]
            full = full_name(name, call)
            issued[full] = meta
            if index < inlined:
                inline[full] = begin
                begin += aligned(meta.inline_bytes)
        if text:
            for name, call, kind, dtype, shape, *others in json.loads(bytes(message[length - text : length])):
                key = name, meta_of(kind, dtype, tuple(shape), *others)
                if key not in self._numbers:
                    self._numbers[key] = len(self._known)
                    self._known.append(key)
                issued[full_name(name, call)] = key[1]
        return Report(flags, issued, inline)


def failure_message(text: str) -> bytes:
    """The message of a rank that has failed."""
    data = text.encode()
    return _HEAD.pack(_HEAD.size + len(data), len(data), 0, 0, FAILED) + data


def length_of(message: memoryview) -> int:
    """Bytes of a message, of which this is the begin."""
    return int(_HEAD.unpack_from(message)[0])


def inline_begin(message: bytes, undisturbed: Sequence[int]) -> int:
    """Where inline tensors begin in a message that holds nothing else but them, with one of these flags; else 0."""
    _, text, count, inlined, flags = _HEAD.unpack_from(message)
    is_plain = count and count == inlined and not text and flags in undisturbed
    return aligned(_HEAD.size + count * _OPERATION.size) if is_plain else 0


def aligned(size: int) -> int:
    """Bytes from one tensor's begin to the next one's."""
    return -(-size // _ALIGNED) * _ALIGNED


def padded(data: bytes) -> bytes:
    """Data with as many zeros as make it `aligned`."""
    return data.ljust(aligned(len(data)), b"\0")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor on the CPU."""
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)
