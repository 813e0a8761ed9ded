"""Asynchronous operations: a collective issues one, and a caller waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rankzero.compat.horovod.torch.messages import Handle, Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Key = tuple[str, int]
"""Name of an operation, and number of the call if the user gave no name, else 0."""


class Pending:
    """An asynchronous operation, and the function that makes the caller's result of it."""

    def __init__(self, handle: Handle, group: ProcessSet, finish: Callable[[Any], Any]) -> None:
        self.handle = handle
        # The set may be removed before a caller waits.
        self.coordinator = group.coordinator
        self.finish = finish

    def __call__(self) -> Any:
        """Waits like `synchronize`. Horovod's sparse operations are called to wait for them."""
        return synchronize(self)


def key_of(kind: str, name: str | None, group: ProcessSet) -> Key:
    """Returns the key by which ranks match an operation: its name, or the number of the call without a name."""
    return (kind, group.coordinator.requests.count_call(kind)) if name is None else (f"{kind}.{name}", 0)


def keys_of(kind: str, name: str | None, group: ProcessSet, count: int) -> list[Key]:
    """Returns the keys by which ranks match the operations of several tensors in one call."""
    whole, call = key_of(kind, name, group)
    return [(whole, call)] if count == 1 else [(f"{whole}.{index}", call) for index in range(count)]


def checked(tensor: Any) -> torch.Tensor:
    """Returns a dense tensor unchanged. Raises TypeError for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a collective takes a torch.Tensor, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError("a collective takes a dense tensor: to_dense() it, or use hvd.sparse_allreduce_async")
    return tensor


def issue(
    key: Key,
    meta: Meta,
    tensor: torch.Tensor,
    group: ProcessSet,
    finish: Callable[[Any], Any] | None = None,
    splits: list[int] | None = None,
) -> Pending:
    """Issues this rank's part of an operation. `synchronize` executes it, or after `begin` a thread.

    Args:
        key: Key by which ranks match the operation.
        meta: The properties that must be the same on all ranks.
        tensor: This rank's tensor.
        group: The ranks that take part.
        finish: Makes the caller's result of the operation's; None returns it unchanged.
        splits: Number of rows for each rank in an alltoall.

    Raises:
        ValueError: this rank is not a member of the group, or an operation of this name has not finished.
    """
    if not group.included():
        raise ValueError(f"rank {global_process_set.rank()} is no member of {group}")
    handle = group.coordinator.requests.issue(Request(*key, meta, tensor.detach(), splits))
    return Pending(handle, group, finish or (lambda result: result))


def issue_in_place(key: Key, meta: Meta, tensor: torch.Tensor, group: ProcessSet) -> Pending:
    """Issues an operation whose result is written into the tensor.

    Raises:
        ValueError: as `issue`, or several elements of the tensor share memory.
    """
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError("elements of the tensor share their memory (expand): nothing can be written there; clone() it")
    if not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg()):
        return issue(key, meta, tensor, group, lambda _: tensor)
    # Another thread may execute the operation, and must not write into an inference tensor. The memory of a conjugated
    # or negated tensor does not contain its values.
    with torch.inference_mode(False):
        copy = tensor.detach().resolve_conj().resolve_neg().clone()

    def finish(_: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensor.copy_(copy)

    return issue(key, meta, copy, group, finish)


P = TypeVar("P", Pending, list[Pending])


def begin(pending: P) -> P:
    """Lets a thread execute one or several operations while the caller continues."""
    for one in _each(pending):
        one.coordinator.drive()
    return pending


def poll(handle: Pending | Sequence[Pending]) -> bool:
    """Returns True if `synchronize` would return without waiting."""
    return all(one.handle.is_done or one.coordinator.requests.failed for one in _each(handle))


def synchronize(handle: Pending | Sequence[Pending]) -> Any:
    """Waits for one or several asynchronous operations, and returns the result.

    Raises:
        HorovodInternalError: an operation failed.
    """
    found = [one.finish(one.coordinator.wait(one.handle)) for one in _each(handle)]
    return found[0] if isinstance(handle, Pending) else found


def _each(handle: Pending | Sequence[Pending]) -> Iterable[Pending]:
    return [handle] if isinstance(handle, Pending) else handle
