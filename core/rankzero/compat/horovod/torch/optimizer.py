"""`DistributedOptimizer`: reduces gradients during the backward pass."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from rankzero.compat.horovod.torch.allreduce import checked_op
from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.execute import AVERAGE
from rankzero.compat.horovod.torch.reducer import Reducer, Reduction
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
    """Returns the same optimizer, whose class is now a subclass that reduces gradients over ranks before each step.

    Args:
        optimizer: Any optimizer; schedulers may have been created for it before.
        named_parameters: ``model.named_parameters()``; None numbers the parameters.
        compression: A member of `Compression`: the type in which gradients are sent.
        backward_passes_per_step: Backward passes whose gradients are summed before a reduction.
        op: ``Average`` (None) or ``Sum``.
        gradient_predivide_factor: Factor by which gradients are divided before the sum; the rest of the division by
            the number of ranks follows after it.
        num_groups: Old name of ``groups``.
        groups: A number, or lists of parameters. It is checked and has no effect, since small gradients are always
            reduced together.
        sparse_as_dense: Whether sparse gradients are sent as dense tensors; the step gets them sparse.
        process_set: The ranks that take part.

    Raises:
        ValueError: parameters without a name or with the same one, options that exclude each other, or an
            optimizer that is distributed already.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    op = checked_op(op)
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    _check_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
    _check_groups(num_groups or None if groups is None else groups)
    names = _named(optimizer, named_parameters)
    how = Reduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    reducer = Reducer(names, backward_passes_per_step, how)
    base = type(optimizer)
    # The object stays the same, since schedulers and scalers refer to it.
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    distributed = cast(_Distributed, optimizer)
    distributed._rz = reducer
    if "step" in vars(optimizer):
        # A scheduler that was created before has replaced `step` by a function that calls the old class's step.
        vars(optimizer)["step"] = _reducing(vars(optimizer)["step"], reducer)
    reducer.add(_parameters(optimizer))
    return distributed


def _check_passes(passes: Any) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes!r}; it must be a positive integer")


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups is {groups!r}; it must be a positive integer or a list of lists of parameters")
    grouped = [parameter for group in groups for parameter in group]
    if wrong := [part for part in grouped if not isinstance(part, torch.Tensor)]:
        raise ValueError(f"groups must consist of torch.Tensor, not {type(wrong[0]).__name__}")
    if len(set(grouped)) < len(grouped):
        raise ValueError("a parameter can only appear once in groups")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[torch.Tensor, str]:
    """Returns the names that the user gave to the parameters. Raises ValueError."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter): model.named_parameters()")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named: dict[torch.Tensor, str] = {parameter: name for name, parameter in pairs}
    if missing := sum(parameter not in named for parameter in _parameters(optimizer)):
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {missing} of the "
            "optimizer's"
        )
    return named


def _reducing(step: Callable[..., Any], reducer: Reducer) -> Callable[..., Any]:
    """Wraps a step to reduce gradients before it; with a closure, after each call of the closure."""

    @functools.wraps(step)
    def reduced(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is None:
            reducer.before_step()
            return step(**options)
        if not reducer.should_synchronize:
            return step(closure, **options)

        if reducer.has_begun():
            # Gradients of a backward pass before the step, as SAM has one.
            reducer.before_step()

        def with_gradients() -> Any:
            loss = closure()
            reducer.before_step()
            return loss

        return step(with_gradients, **options)

    return reduced


class _Distributed(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to an optimizer's class."""

    _rz: Reducer

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Waits for the gradients of all ranks, then steps; with a closure, after each call of the closure."""
        return _reducing(super().step, self._rz)(closure, **options)

    # torch wraps the step of each class to call hooks; here the wrapped step of the base class calls them.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Waits for the gradients of all ranks, for example to clip them."""
        self._rz.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` in the block skip the reduction, after a call of `synchronize`."""
        self._rz.should_synchronize = False
        try:
            yield
        finally:
            self._rz.should_synchronize = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler reads this property in its step, before it checks for overflows, which must include those
        # of all ranks.
        self._rz.before_unscaling()
        own = vars(self).get("_step_supports_amp_scaling")
        return bool(getattr(super(), "_step_supports_amp_scaling", False) if own is None else own)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets the gradients like the optimizer. Raises AssertionError between ``backward()`` and ``step()``."""
        self._rz.check_idle()
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes whose gradients are summed before a reduction. Raises ValueError."""
        _check_passes(passes)
        self._rz.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group like torch's optimizer, and reduces the gradients of its parameters, too."""
        super().add_param_group(param_group)
        self._rz.add(_parameters(self))

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state like torch's optimizer, after running reductions have ended; their results are discarded."""
        self._rz.forget()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> Any:
        raise TypeError("a DistributedOptimizer cannot be copied or pickled: give its state_dict()")
