"""`DistributedOptimizer`: reduces gradients while the backward pass goes on."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from rankzero.compat.horovod.torch.allreduce import allreduce_async_, checked_op
from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE
from rankzero.compat.horovod.torch.pending import synchronize
from rankzero.compat.horovod.torch.sparse import sparse_allreduce_async
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer with gradients reduced over ranks before each step: an object of a subclass of its class.

    Args:
        optimizer: Whose parameters and state the result shares.
        named_parameters: ``model.named_parameters()``; None numbers them.
        compression: `Compression`: the type in which gradients travel.
        backward_passes_per_step: Backward passes that add up before a reduction.
        op: ``Average`` (None) or ``Sum``.
        gradient_predivide_factor: Divides the average before the sum, the rest after it.
        num_groups: Horovod's; small gradients are always reduced together.
        groups: Horovod's; as ``num_groups``.
        sparse_as_dense: Sparse gradients travel dense.
        process_set: The ranks that take part.

    Raises:
        ValueError: parameters without a name or with the same one, or options that exclude each other.
    """
    op = checked_op(op)
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step!r}; it must be a positive integer")
    base = type(optimizer)
    cls = type(base.__name__, (_Distributed, base), {})
    wrapped = copy.copy(optimizer)
    wrapped.__class__ = cls
    found = cast(_Distributed, wrapped)
    found._rz = _Reducer(
        _named(optimizer, named_parameters), compression, backward_passes_per_step, op, gradient_predivide_factor,
        sparse_as_dense, process_set,
    )  # fmt: skip
    return found


def _named(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[torch.Tensor, str]:
    """The name of each of the optimizer's parameters. Raises ValueError."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {parameter: f"noname.{index}" for index, parameter in enumerate(owned)}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter): model.named_parameters()")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {parameter: name for name, parameter in pairs}
    if missing := sum(parameter not in named for parameter in owned):
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {missing} of the "
            "optimizer's"
        )
    return {parameter: named[parameter] for parameter in owned}


class _Reducer:
    """The gradients of some parameters on their way."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        compression: Any,
        passes: int,
        op: str,
        predivide: float,
        sparse_as_dense: bool,
        group: ProcessSet,
    ) -> None:
        self.names = names
        self.compression = compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.group = group
        self.left = dict.fromkeys(names, passes)
        self.pending: dict[torch.Tensor, tuple[Any, Any]] = {}
        self.is_synchronized = False
        self.should_synchronize = True
        if group.size() > 1 and group.included():
            for parameter in names:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self.pending:
            raise AssertionError(
                f"gradients of {self.names[parameter]!r} were computed more than backward_passes_per_step="
                f"{self.passes} times before step(): increase it to accumulate gradients locally"
            )
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self._begin(parameter)

    def _begin(self, parameter: torch.Tensor) -> None:
        gradient, name = parameter.grad, f"gradient.{self.names[parameter]}"
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        if gradient.is_sparse and not self.sparse_as_dense:
            self.pending[parameter] = sparse_allreduce_async(gradient, name, self.op, self.group), None
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        before = after = 1.0
        if self.op == AVERAGE and self.predivide != 1.0:
            before, after = 1.0 / self.predivide, self.predivide
        compressed, context = self.compression.compress(gradient)
        handle = allreduce_async_(
            compressed, name=name, op=self.op, prescale_factor=before, postscale_factor=after, process_set=self.group
        )
        self.pending[parameter] = handle, context

    def synchronize(self) -> None:
        """Begins what no hook has begun, with zeros where there is no gradient, and waits for all."""
        if self.group.size() == 1 or not self.group.included():
            return
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self.pending:
                self._begin(parameter)
        for parameter, (handle, context) in self.pending.items():
            reduced = synchronize(handle)
            parameter.grad = reduced if reduced.is_sparse else self.compression.decompress(reduced, context)
            self.left[parameter] = self.passes
        self.pending.clear()
        self.is_synchronized = True


class _Distributed(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _rz: _Reducer

    def step(self, closure: Any = None) -> Any:
        """Waits for the gradients of all ranks, then steps."""
        reducer = self._rz
        if reducer.should_synchronize:
            if reducer.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced a second time",
                    stacklevel=2,
                )
            reducer.synchronize()
        reducer.is_synchronized = False
        return super().step(closure)

    def synchronize(self) -> None:
        """Waits for the gradients of all ranks, for example to clip them."""
        self._rz.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A `step` in the block does not reduce again."""
        self._rz.should_synchronize = False
        try:
            yield
        finally:
            self._rz.should_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises AssertionError between ``backward()`` and ``step()``."""
        if self._rz.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are on their way"
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes that add up before a reduction, from now on."""
        self._rz.passes = passes
        self._rz.left = dict.fromkeys(self._rz.names, passes)

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's; what was on its way is waited for and forgotten."""
        for handle, _ in self._rz.pending.values():
            synchronize(handle)
        self._rz.pending.clear()
        self._rz.is_synchronized = False
        self.set_backward_passes_per_step(self._rz.passes)
        super().load_state_dict(state_dict)
