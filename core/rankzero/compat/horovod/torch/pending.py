"""Operations on their way: how a collective issues one, and how a caller waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rankzero.compat.horovod.torch.messages import Handle, Meta, Request
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

Key = tuple[str, int]
"""Name of an operation, and number of the call if the user gave none."""


class Pending:
    """An asynchronous operation, and what becomes of its result."""

    def __init__(self, handle: Handle, group: ProcessSet, finish: Callable[[Any], Any]) -> None:
        self.handle = handle
        # The set may be removed before somebody waits.
        self.coordinator = group.coordinator
        self.finish = finish

    def __call__(self) -> Any:
        """As `synchronize`: so Horovod's sparse ones are waited for."""
        return synchronize(self)


def key_of(kind: str, name: str | None, group: ProcessSet) -> Key:
    """What the ranks match an operation by; without a name the number of the call, which then counts on every rank."""
    return (kind, group.coordinator.requests.count_call(kind)) if name is None else (f"{kind}.{name}", 0)


def keys_of(kind: str, name: str | None, group: ProcessSet, count: int) -> list[Key]:
    """As `key_of`, for each of several tensors that go together."""
    whole, call = key_of(kind, name, group)
    return [(whole, call)] if count == 1 else [(f"{whole}.{index}", call) for index in range(count)]


def checked(tensor: Any) -> torch.Tensor:
    """The tensor. Raises TypeError."""
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
    """Issues this rank's part; `synchronize` carries it out, or after `begin` a thread.

    Args:
        key: By which ranks find each other.
        meta: What must be the same on all.
        tensor: This rank's.
        group: Who takes part.
        finish: Makes what the caller gets of the result; None: nothing is to be done.
        splits: Rows for each rank, of an alltoall.

    Raises:
        ValueError: this rank is no member, or the name is on its way already.
    """
    if not group.included():
        raise ValueError(f"rank {global_process_set.rank()} is no member of {group}")
    handle = group.coordinator.requests.issue(Request(*key, meta, tensor.detach(), splits))
    return Pending(handle, group, finish or (lambda result: result))


def issue_in_place(key: Key, meta: Meta, tensor: torch.Tensor, group: ProcessSet) -> Pending:
    """As `issue`, of what is written into the tensor.

    Raises:
        ValueError: see `issue`; or several elements share a place in memory.
    """
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError("elements of the tensor share their memory (expand): nothing can be written there; clone() it")
    if not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg()):
        return issue(key, meta, tensor, group, lambda _: tensor)
    # Another thread may carry it out, and must not write into one of inference mode; nor are its bytes its values.
    with torch.inference_mode(False):
        copy = tensor.detach().resolve_conj().resolve_neg().clone()

    def finish(_: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensor.copy_(copy)

    return issue(key, meta, copy, group, finish)


P = TypeVar("P", Pending, list[Pending])


def begin(pending: P) -> P:
    """Lets a thread carry out one operation, or several, while the caller goes on."""
    for one in _each(pending):
        one.coordinator.drive()
    return pending


def poll(handle: Pending | Sequence[Pending]) -> bool:
    """True if `synchronize` would not wait."""
    return all(one.handle.is_done or one.coordinator.requests.failed for one in _each(handle))


def synchronize(handle: Pending | Sequence[Pending]) -> Any:
    """Waits for an asynchronous operation, or several, and gives the result.

    Raises:
        HorovodInternalError: it failed.
    """
    found = [one.finish(one.coordinator.wait(one.handle)) for one in _each(handle)]
    return found[0] if isinstance(handle, Pending) else found


def _each(handle: Pending | Sequence[Pending]) -> Iterable[Pending]:
    return [handle] if isinstance(handle, Pending) else handle
