"""`Reducer`: reduces the gradients of an optimizer's parameters over ranks."""

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
from rankzero.compat.horovod.torch.ops import empty_sparse, sparse_allreduce_async
from rankzero.compat.horovod.torch.pending import Pending, synchronize
from rankzero.compat.horovod.torch.world import ProcessSet

_hooks: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
"""The hook of each parameter, which belongs to the optimizer that was created last for it."""


@dataclass(frozen=True)
class Reduction:
    """Options of the reduction of gradients.

    Attributes:
        compression: The type in which gradients are sent.
        op: ``Average`` or ``Sum``.
        predivide: Factor by which gradients are divided before the sum of an average; the rest follows after it.
        sparse_as_dense: Whether sparse gradients are sent as dense tensors.
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
    """Starts the reduction of gradients during the backward pass, and waits for the results.

    Args:
        names: Names of parameters, which may be more than the optimizer's.
        passes: Backward passes whose gradients are summed before a reduction.
        how: Options of the reduction.
    """

    def __init__(self, names: Mapping[torch.Tensor, str], passes: int, how: Reduction) -> None:
        self.should_synchronize = True
        self._is_synchronized = False
        self._is_ready = False
        self._passes = passes
        self._how = how
        # A second optimizer may have parameters with the same names, such as the second network of a GAN.
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
        """Adds parameters, and installs a hook on each one that requires gradients and has none yet."""
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
        """Sets the number of backward passes whose gradients are summed before a reduction."""
        self._passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def has_begun(self) -> bool:
        """Returns True between a backward pass and the wait for its gradients."""
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
        """Calls `synchronize`, unless the user has switched it off or `before_unscaling` has called it."""
        if self.should_synchronize and not self._is_ready:
            self.synchronize()
        self._is_synchronized = self._is_ready = False

    def before_unscaling(self) -> None:
        """Calls `synchronize` for the next step, which a gradient scaler skips if gradients have overflowed."""
        if self.should_synchronize and not self._is_synchronized:
            self.synchronize()
            self._is_ready = True

    # A compiled step must not trace waits for other ranks.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def synchronize(self) -> None:
        """Starts the reductions that no hook has started, with zeros for missing gradients, and waits for all.

        Raises:
            HorovodInternalError: a reduction failed; all others have ended.
            AssertionError: a gradient was changed while it was reduced.
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
        self._reset()
        if errors:
            raise errors[0]
        self._is_synchronized = True

    def forget(self) -> None:
        """Waits for running reductions, and resets the state as after a step."""
        for sent in self._sent.values():
            try:
                synchronize(sent.pending)
            except HorovodInternalError:
                # The step is discarded anyway: elastic.run restores the state after such an error.
                continue
        self._reset()
        self._is_synchronized = self._is_ready = False

    def _reset(self) -> None:
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
            # Another rank may have a gradient of this parameter.
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
            # `detach` would count the reduction's writes as changes by the user.
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
    """Returns a hook with a weak reference, since a cycle of a parameter and its reducer would never be freed."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        if method := reference():
            method(parameter)

    return hook
