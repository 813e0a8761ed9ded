"""`DistributedOptimizer`: reduces gradients during the backward pass."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rankzero.compat.horovod.torch.collectives import allreduce_async_, checked_op, sparse_allreduce_async
from rankzero.compat.horovod.torch.compression import Compression
from rankzero.compat.horovod.torch.requests import AVERAGE, HorovodInternalError, Request
from rankzero.compat.horovod.torch.world import ProcessSet, global_process_set

_hooks: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()
"""The hook of each parameter, which belongs to the optimizer that was created last for it."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
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
        gradient_predivide_factor: Factor by which gradients are divided before the sum, and multiplied after it.
        num_groups: Without effect, since gradients that are ready together are reduced together.
        groups: Likewise.
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
    scales = (1 / gradient_predivide_factor, gradient_predivide_factor) if op == AVERAGE else (1.0, 1.0)
    reducer = _Reducer(_named(optimizer, named_parameters), (op, *scales, process_set))
    reducer.compression, reducer.sparse_as_dense = compression, sparse_as_dense
    reducer.set_passes(backward_passes_per_step)
    # The object stays the same, since schedulers and scalers refer to it.
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    distributed = cast(_Distributed, optimizer)
    distributed._rz = reducer
    # torch calls it before the step of any class, also if a scheduler has wrapped the step; here before other hooks.
    optimizer.register_step_pre_hook(_before_step)
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)
    reducer.add(_parameters(optimizer))
    return distributed


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[torch.Tensor, str]:
    """Returns the names that the user gave to the parameters. Raises ValueError."""
    pairs = [] if named_parameters is None else list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter): model.named_parameters()")
    if twice := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in named for parameter in _parameters(optimizer))
    if missing and named_parameters is not None:
        raise ValueError(f"named_parameters lacks the names of {missing} of the optimizer's parameters")
    return named


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Reduces gradients before a step; with a closure, after each call of the closure. A hook of the step."""
    reducer, given = optimizer._rz, [*args[1:], kwargs.get("closure")]
    closure = given[0]
    if closure is None:
        reducer.before_step()
        return None
    if not reducer.should_synchronize:
        return None
    if reducer.has_begun():
        # Gradients of a backward pass before the step, as SAM has one.
        reducer.before_step()

    def with_gradients() -> Any:
        loss = closure()
        reducer.before_step()
        return loss

    return (args[0], with_gradients, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}


class _Distributed(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to an optimizer's class."""

    _rz: _Reducer

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
        # torch's GradScaler reads it before it checks for overflows, which must include those of all ranks.
        if self._rz.should_synchronize and not self._rz.is_synchronized:
            self._rz.synchronize()
            self._rz.is_ready = True
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


class _Sent(NamedTuple):
    """A gradient on its way, with its version, and the context of its compression."""

    gradient: torch.Tensor
    version: int
    request: Request
    context: Any


class _Reducer:
    """Starts the reduction of gradients during the backward pass, and waits for the results."""

    compression: Any = Compression.none
    sparse_as_dense = False

    def __init__(self, known: dict[torch.Tensor, str], options: tuple[str, float, float, ProcessSet]) -> None:
        self._known, self._options, group = known, options, options[-1]
        self.should_synchronize, self.is_synchronized, self.is_ready = True, False, False
        # A second optimizer may have parameters with the same names, such as the second network of a GAN.
        number = next(group.optimizers)
        self._suffix = f"#{number}" if number > 1 else ""
        self._names: dict[torch.Tensor, str] = {}
        self._sent: dict[torch.Tensor, _Sent] = {}
        self._sparse_dims: dict[torch.Tensor, int] = {}
        self._hooked: set[torch.Tensor] = set()
        self._has_peers = group.size() > 1 and group.included()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Adds parameters, and installs a hook on each one that requires gradients and has none yet."""
        for parameter in parameters:
            if parameter not in self._names:
                self._names[parameter] = self._known.get(parameter, f"noname.{len(self._names)}") + self._suffix
                self._left[parameter] = self._passes
            if self._has_peers and parameter.requires_grad and parameter not in self._hooked:
                if before := _hooks.pop(parameter, None):
                    before.remove()
                # A cycle of a parameter and its reducer would never be freed.
                method = weakref.WeakMethod(self._on_gradient)
                hook = lambda one, method=method: (call := method()) and call(one)  # noqa: E731
                _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooked.add(parameter)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes whose gradients are summed before a reduction. Raises ValueError."""
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes!r}; it must be a positive integer")
        self._passes, self._left = passes, dict.fromkeys(self._names, passes)

    def has_begun(self) -> bool:
        """Returns True between a backward pass and the wait for its gradients."""
        return bool(self._sent) or any(left != self._passes for left in self._left.values())

    def check_idle(self) -> None:
        """Raises AssertionError between a backward pass and the step."""
        if self.has_begun():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are on their way, or summed over "
                f"backward_passes_per_step={self._passes}"
            )

    def before_step(self) -> None:
        """Calls `synchronize`, unless the user has switched it off or a gradient scaler has called it."""
        if self.should_synchronize and not self.is_ready:
            self.synchronize()
        self.is_synchronized = self.is_ready = False

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
        if self.is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(), "
                "or synchronize() called twice: gradients are reduced a second time",
                stacklevel=4,
            )
        for parameter, sent in self._sent.items():
            if parameter.grad is not sent.gradient or sent.gradient._version != sent.version:
                raise AssertionError(
                    f"the gradient of {self._names[parameter]!r} was changed on its way to the other ranks: call "
                    "optimizer.synchronize() before you clip or unscale gradients, and step in "
                    "optimizer.skip_synchronize()"
                )
        self.add(list(self._names))
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._sent:
                self._begin(parameter)
        self.is_synchronized, errors = False, []
        for parameter, sent in self._sent.items():
            try:
                self._finish(parameter, sent)
            except HorovodInternalError as error:
                errors.append(error)
        self._sent.clear()
        self.set_passes(self._passes)
        if errors:
            raise errors[0]
        self.is_synchronized = True

    def forget(self) -> None:
        """Waits for running reductions, and resets the state as after a step."""
        for sent in self._sent.values():
            # The step is discarded anyway: elastic.run restores the state after such an error.
            with contextlib.suppress(HorovodInternalError):
                sent.request.wait()
        self._sent.clear()
        self.set_passes(self._passes)
        self.is_synchronized = self.is_ready = False

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._sent:
            raise AssertionError(
                f"gradients of {self._names[parameter]!r} were computed more than backward_passes_per_step="
                f"{self._passes} times before step(): increase it to accumulate gradients locally"
            )
        self.is_synchronized = self.is_ready = False
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._begin(parameter)

    def _begin(self, parameter: torch.Tensor) -> None:
        name, gradient, context = f"gradient.{self._names[parameter]}", parameter.grad, None
        op, before, after, group = self._options
        if gradient is None:
            # Another rank may have a gradient of this parameter.
            gradient = torch.zeros_like(parameter)
            if dims := self._sparse_dims.get(parameter):
                gradient = gradient.to_sparse(dims)
            parameter.grad = gradient
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} requires a gradient itself, which other ranks do not "
                "know of: for create_graph=True call torch.autograd.grad"
            )
        if gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
        if gradient.is_sparse and not self.sparse_as_dense:
            request = sparse_allreduce_async(gradient, name, op, group)
        else:
            # `detach` would count the reduction's writes as changes by the user.
            dense = gradient.to_dense() if gradient.is_sparse else gradient.data
            compressed, context = self.compression.compress(dense)
            request = allreduce_async_(compressed, None, name, op, before, after, group)
        self._sent[parameter] = _Sent(gradient, gradient._version, request, context)

    def _finish(self, parameter: torch.Tensor, sent: _Sent) -> None:
        reduced = sent.request.wait()
        if not reduced.is_sparse:
            reduced = self.compression.decompress(reduced, sent.context)
        if sent.gradient.is_sparse:
            parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse(sent.gradient.sparse_dim())
        elif reduced.data_ptr() != sent.gradient.data_ptr():
            sent.gradient.copy_(reduced)
