"""`Reducer`: the gradients of an optimizer's parameters, on their way to the other ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rankzero.compat.horovod.torch.allreduce import allreduce_async_
from rankzero.compat.horovod.torch.errors import HorovodInternalError
from rankzero.compat.horovod.torch.execute import AVERAGE
from rankzero.compat.horovod.torch.pending import Pending, synchronize
from rankzero.compat.horovod.torch.sparse import empty_sparse, sparse_allreduce_async
from rankzero.compat.horovod.torch.world import ProcessSet

_hooks: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
"""The hook of each parameter: one, of the optimizer that was made last for it."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced.

    Attributes:
        compression: In which type they travel.
        op: ``Average`` or ``Sum``.
        predivide: Divides an average before the sum; the rest after it.
        sparse_as_dense: Sparse gradients travel dense.
        group: The ranks that take part.
    """

    compression: Any
    op: str
    predivide: float
    sparse_as_dense: bool
    group: ProcessSet


@dataclass(frozen=True)
class _Sent:
    gradient: torch.Tensor
    version: int
    pending: Pending
    context: Any

    def is_untouched_in(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is self.gradient and self.gradient._version == self.version


class Reducer:
    """Sends gradients while the backward pass goes on, and waits for them.

    Args:
        names: Of parameters, which may be more than the optimizer's.
        passes: Backward passes that add up before a reduction.
        how: How gradients are reduced.
    """

    def __init__(self, names: Mapping[torch.Tensor, str], passes: int, how: Reduction) -> None:
        self.should_synchronize = True
        self._is_synchronized = False
        self._is_ready = False
        self._passes = passes
        self._how = how
        # A second optimizer may have parameters of the same names, as the two networks of a GAN.
        number = next(how.group.coordinator.optimizers)
        self._suffix = f"#{number}" if number > 1 else ""
        self._known = names
        self._names: dict[torch.Tensor, str] = {}
        self._left: dict[torch.Tensor, int] = {}
        self._sent: dict[torch.Tensor, _Sent] = {}
        self._sparse_dims: dict[torch.Tensor, int] = {}
        self._hooked: set[torch.Tensor] = set()
        self._has_peers = how.group.size() > 1 and how.group.included()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes over the gradients of parameters; of those it has, too, once they require gradients."""
        for parameter in parameters:
            if parameter not in self._names:
                self._names[parameter] = self._known.get(parameter, f"noname.{len(self._names)}") + self._suffix
                self._left[parameter] = self._passes
            if self._has_peers and parameter.requires_grad and parameter not in self._hooked:
                if before := _hooks.pop(parameter, None):
                    before.remove()
                _hooks[parameter] = parameter.register_post_accumulate_grad_hook(_weak(self._on_gradient))  # type: ignore[no-untyped-call]
                self._hooked.add(parameter)

    def set_passes(self, passes: int) -> None:
        """Backward passes that add up before a reduction, from now on."""
        self._passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def has_begun(self) -> bool:
        """True between a backward pass and what waits for its gradients."""
        return bool(self._sent) or any(left != self._passes for left in self._left.values())

    def check_idle(self) -> None:
        """Raises AssertionError between a backward pass and the step."""
        if self._sent:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are on their way"
            )
        if self.has_begun():
            raise AssertionError(
                f"optimizer.zero_grad() was called between the backward passes of one step, of which there are "
                f"backward_passes_per_step={self._passes}: call it after optimizer.step()"
            )

    def before_step(self) -> None:
        """`synchronize`, unless the user said that it is not needed, or `before_unscaling` did."""
        if self.should_synchronize and not self._is_ready:
            self.synchronize()
        self._is_synchronized = self._is_ready = False

    def before_unscaling(self) -> None:
        """`synchronize` for the step that follows, or does not where gradients have overflowed."""
        if self.should_synchronize and not self._is_synchronized:
            self.synchronize()
            self._is_ready = True

    # A compiled step does not trace what waits for other ranks.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def synchronize(self) -> None:
        """Begins what no hook has begun, with zeros where there is no gradient, and waits for all.

        Raises:
            HorovodInternalError: a reduction failed; the others have ended.
            AssertionError: a gradient was changed on its way.
        """
        if not self._has_peers:
            return
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(), "
                "or synchronize() called twice: gradients are reduced a second time",
                stacklevel=4,
            )
        self._check_untouched()
        if len(self._hooked) < len(self._names):
            self.add(self._names)
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._sent:
                self._begin(parameter)
        errors = []
        for parameter, sent in self._sent.items():
            try:
                self._finish(parameter, sent)
            except HorovodInternalError as error:
                errors.append(error)
        self._begin_anew()
        if errors:
            raise errors[0]
        self._is_synchronized = True

    def forget(self) -> None:
        """Waits for what is on its way, and is as new."""
        for sent in self._sent.values():
            try:
                synchronize(sent.pending)
            except HorovodInternalError:
                # Of a step that is given up: elastic.run restores after such an error.
                continue
        self._begin_anew()
        self._is_synchronized = self._is_ready = False

    def _begin_anew(self) -> None:
        self._sent.clear()
        self.set_passes(self._passes)

    def _check_untouched(self) -> None:
        touched = [
            self._names[parameter] for parameter, sent in self._sent.items() if not sent.is_untouched_in(parameter)
        ]
        if touched:
            raise AssertionError(
                f"the gradient of {touched[0]!r} was changed on its way to the other ranks: call "
                "optimizer.synchronize() before you clip or unscale gradients, and step in "
                "optimizer.skip_synchronize()"
            )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._sent:
            raise AssertionError(
                f"gradients of {self._names[parameter]!r} were computed more than backward_passes_per_step="
                f"{self._passes} times before step(): increase it to accumulate gradients locally"
            )
        self._is_synchronized = self._is_ready = False
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._begin(parameter)

    def _begin(self, parameter: torch.Tensor) -> None:
        how, name = self._how, f"gradient.{self._names[parameter]}"
        gradient = parameter.grad
        if gradient is None:
            # Another rank may have one.
            dims = self._sparse_dims.get(parameter)
            gradient = parameter.grad = empty_sparse(parameter, dims) if dims else torch.zeros_like(parameter)
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} requires a gradient itself, which other ranks do not "
                "know of: for create_graph=True call torch.autograd.grad"
            )
        if gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
        if gradient.is_sparse and not how.sparse_as_dense:
            pending: Pending = sparse_allreduce_async(gradient, name, how.op, how.group)
            context = None
        else:
            # Not `detach`: that would count what the reduction does as the user's changes.
            dense = gradient.to_dense() if gradient.is_sparse else gradient.data
            compressed, context = how.compression.compress(dense)
            before = 1.0 / how.predivide if how.op == AVERAGE else 1.0
            after = how.predivide if how.op == AVERAGE else 1.0
            pending = allreduce_async_(compressed, None, name, how.op, before, after, how.group)
        self._sent[parameter] = _Sent(gradient, gradient._version, pending, context)

    def _finish(self, parameter: torch.Tensor, sent: _Sent) -> None:
        reduced = synchronize(sent.pending)
        if not reduced.is_sparse:
            reduced = self._how.compression.decompress(reduced, sent.context)
        if sent.gradient.is_sparse:
            parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse(sent.gradient.sparse_dim())
        elif reduced.data_ptr() != sent.gradient.data_ptr():
            sent.gradient.copy_(reduced)


def _weak(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: a parameter that holds its reducer, which holds it, is never freed."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        if method := reference():
            method(parameter)

    return hook
