"""The messages of a round of a `Coordinator`: the operations that each rank has newly issued."""

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
"""Most bytes of a tensor that is sent in the round's message itself."""

_ALIGNED = 16
"""Alignment in bytes of tensors in a message, so that they are read without a copy."""

_HEAD = struct.Struct("<IIIHBx")
"""Bytes of the message, bytes of the text, count of operations, count of inline tensors, flags."""

FAILED = 8
"""Flag of a message that reports the failure of its rank, with the reason."""

INLINED = 1 << 12
"""Most tensors of one rank that are sent in a round's message."""

KNOWN = 1 << 14
"""Most names with numbers, more than a model has parameters. A program that keeps creating names resets them then."""

_OPERATION = struct.Struct("<II")
"""An operation in a message: number of the name, and number of the call if the user gave no name."""


@dataclass(frozen=True)
class Meta:
    """The properties of an operation that must be the same on all ranks.

    Attributes:
        kind: ``"allreduce"``, ``"allgather"``, ``"broadcast"``, ``"alltoall"`` or ``"barrier"``.
        dtype: Type of the tensor, as text.
        shape: Shape of the tensor; without the first dimension if that may differ between ranks.
        op: Operation of a reduction.
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
        """Returns the type of the tensor."""
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
        """Returns the properties as text for an error message."""
        words = [self.kind, self.op, self.dtype, str(list(self.shape)), "" if self.device == "cpu" else self.device]
        if self.kind == "broadcast":
            words.append(f"of rank {self.root}")
        return " ".join(word for word in words if word)


class Handle:
    """The state of an operation that was issued: its result or error, once it is done."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        """True once the operation has succeeded or failed."""

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Sets the result or the error, and marks the operation as done."""
        self.result, self.error = result, error
        self.is_done = True


@dataclass
class Request:
    """A rank's part of an operation.

    Attributes:
        name: Name by which the ranks' operations are matched.
        call: Number of the call, from 1, if the user gave no name; else 0.
        meta: The properties that must be the same on all ranks.
        tensor: This rank's tensor; a reduction and a broadcast overwrite it.
        splits: Number of rows for each rank in an alltoall.
    """

    name: str
    call: int
    meta: Meta
    tensor: torch.Tensor
    splits: list[int] | None = None
    handle: Handle = field(default_factory=Handle)

    @property
    def full_name(self) -> str:
        """Returns the name of the operation, which is different for each call."""
        return full_name(self.name, self.call)


@functools.lru_cache(maxsize=10_000)
def meta_of(*values: Any) -> Meta:
    """Returns a cached `Meta`, whose constructor is slow."""
    return Meta(*values)


def full_name(name: str, call: int) -> str:
    """Returns the name of an operation, with the number of the call if the user gave no name."""
    return f"{name}.noname.{call}" if call else name


@dataclass(frozen=True)
class Report:
    """The decoded message of a rank in a round.

    Attributes:
        flags: Flags of the rank's coordinator.
        issued: Operations that the rank has newly issued, by full name.
        inline: Offset of the data of tiny tensors in the message, by full name.
        failure: Reason why the rank has failed; empty if it has not.
    """

    flags: int
    issued: dict[str, Meta]
    inline: dict[str, int]
    failure: str = ""


class Numbers:
    """Maps names with their `Meta` to short numbers, the same on all ranks in a round."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Meta]] = []
        self._numbers: dict[tuple[str, Meta], int] = {}

    def encode(self, flags: int, new: Sequence[Request]) -> bytes:
        """Returns the message of a rank that has newly issued ``new``. Called once in each round, before sending."""
        if len(self._known) >= KNOWN:
            # At the beginning of a round, every rank has the same number of names.
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
        """Decodes a rank's message. Must be called in the order of ranks, so that all ranks assign the same numbers."""
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
    """Returns the message of a rank that has failed."""
    data = text.encode()
    return _HEAD.pack(_HEAD.size + len(data), len(data), 0, 0, FAILED) + data


def length_of(message: memoryview) -> int:
    """Returns the length in bytes of a message, from its beginning."""
    return int(_HEAD.unpack_from(message)[0])


def inline_begin(message: bytes, undisturbed: Sequence[int]) -> int:
    """Returns the offset of inline tensors if a message has only these, with one of the given flags; else 0."""
    _, text, count, inlined, flags = _HEAD.unpack_from(message)
    is_plain = count and count == inlined and not text and flags in undisturbed
    return aligned(_HEAD.size + count * _OPERATION.size) if is_plain else 0


def aligned(size: int) -> int:
    """Returns a size rounded up to the alignment of tensors in a message."""
    return -(-size // _ALIGNED) * _ALIGNED


def padded(data: bytes) -> bytes:
    """Returns data, padded with zeros to the alignment of tensors in a message."""
    return data.ljust(aligned(len(data)), b"\0")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns a copy of the memory of a tensor on the CPU."""
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)
