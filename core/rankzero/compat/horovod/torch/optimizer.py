"""`DistributedOptimizer`: reduces gradients during the backward pass; the start from the state of one rank."""

# ruff: noqa: I001 (packed imports)
from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import cloudpickle
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rankzero.compat.horovod.torch.collectives import (
    Compression, allreduce_async_, broadcast_async_, broadcast_object, checked_op, sparse_allreduce_async, synchronize,
)  # fmt: skip
from rankzero.compat.horovod.torch.operations import AVERAGE, HorovodInternalError, Request
from rankzero.compat.horovod.torch.world import ProcessSet
from rankzero.compat.horovod.torch.world import global_process_set as WORLD

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
    process_set: ProcessSet = WORLD,
) -> Any:
    """Returns the same optimizer, which now reduces gradients over ranks before each step.

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
    if hasattr(optimizer, "_parameter_names"):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    op = checked_op(op)
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    scales = (1 / gradient_predivide_factor, gradient_predivide_factor) if op == AVERAGE else (1.0, 1.0)
    known = _named(optimizer, named_parameters)
    reducer = _Reducer(optimizer, known, compression, sparse_as_dense, op, *scales, process_set)
    reducer.set_passes(backward_passes_per_step)
    reducer.add_parameters()
    # The object and its class stay the same, since schedulers and scalers refer to it.
    own: Any = optimizer
    own._step_supports_amp_scaling, own._parameter_names = reducer, reducer.names
    own.synchronize = reducer.synchronize
    own.zero_grad, own.skip_synchronize = reducer.zero_grad, reducer.skip_synchronize
    own.__getstate__, own.set_backward_passes_per_step = _refuse_copies, reducer.set_passes
    optimizer.register_load_state_dict_pre_hook(reducer.reset)
    # torch calls it before the step of any class, also if a scheduler has wrapped the step; here before other hooks.
    optimizer.register_step_pre_hook(reducer.before_step)
    own._optimizer_step_pre_hooks.move_to_end(next(reversed(own._optimizer_step_pre_hooks)), last=False)
    return optimizer


def _refuse_copies() -> Any:
    raise TypeError("a DistributedOptimizer cannot be copied or pickled: give its state_dict()")


def _named(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[torch.Tensor, str]:
    """Returns the names that the user gave to the parameters. Raises ValueError."""
    pairs = [] if named_parameters is None else list(named_parameters)
    if twice := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in named for group in optimizer.param_groups for parameter in group["params"])
    if missing and named_parameters is not None:
        raise ValueError(f"named_parameters lacks the names of {missing} of the optimizer's parameters")
    return named


class _Reducer:
    """Starts the reduction of gradients during the backward pass, and waits for the results."""

    def __init__(self, optimizer: Any, known: Any, compression: Any, sparse_as_dense: bool, *options: Any) -> None:
        self._optimizer, self._zero_grad = optimizer, optimizer.zero_grad
        self._known, self._options, group = known, options, options[-1]
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._should_synchronize, self._is_synchronized = True, False
        # A second optimizer may have parameters with the same names, such as the second network of a GAN.
        number = next(group.optimizers)
        self._suffix = f"#{number}" if number > 1 else ""
        self.names: dict[torch.Tensor, str] = {}
        self._sent: dict[torch.Tensor, tuple[torch.Tensor, int, Request, Any]] = {}
        """The gradients on their way, each with its version, and the context of its compression."""
        self._hooked: set[torch.Tensor] = set()
        self._has_peers = group.size() > 1 and group.included()

    def add_parameters(self) -> None:
        """Adds new parameters, and installs a hook on each one that requires gradients and has none yet."""
        for parameter in [one for group in self._optimizer.param_groups for one in group["params"]]:
            if parameter not in self.names:
                self.names[parameter] = self._known.get(parameter, f"noname.{len(self.names)}") + self._suffix
                self._left[parameter] = self._passes
            if self._has_peers and parameter.requires_grad and parameter not in self._hooked:
                if before := _hooks.pop(parameter, None):
                    before.remove()
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                _hooks[parameter] = hook
                self._hooked.add(parameter)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes whose gradients are summed before a reduction."""
        self._passes, self._left = passes, dict.fromkeys(self.names, passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets the gradients like the optimizer. Raises AssertionError between ``backward()`` and ``step()``."""
        self._refuse_between("optimizer.zero_grad()")
        self._zero_grad(*args, **kwargs)

    def __bool__(self) -> bool:
        """Returns True if a step unscales by itself, which `GradScaler.step` queries from the optimizer.

        Torch unscales without a change of a tensor's version, so `synchronize` would not detect it.
        """
        self._refuse_between("scaler.unscale_() or scaler.step()")
        return self._unscales

    def _refuse_between(self, call: str) -> None:
        """Raises AssertionError between a backward pass and the wait for its gradients."""
        if self._sent or any(left != self._passes for left in self._left.values()):
            raise AssertionError(
                f"{call} was called after loss.backward() and before optimizer.synchronize(), which a plain "
                "optimizer.step() calls: the gradients are on their way to the other ranks, or summed over "
                f"backward_passes_per_step={self._passes}"
            )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` in the block skip the reduction, after a call of `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Reduces gradients before a step. A hook of the step, which raises TypeError for a closure."""
        if [*args[1:], kwargs.get("closure")][0] is not None:
            raise TypeError("step(closure) would take gradients of this rank alone: call loss.backward() before step()")
        if self._should_synchronize:
            self.synchronize()
        self._is_synchronized = False

    # A compiled step must not trace waits for other ranks.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def synchronize(self) -> None:
        """Waits for the gradients of all ranks, for example to clip them. Missing ones are zeros.

        Raises:
            HorovodInternalError: a reduction failed.
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
        for parameter, (gradient, version, *_) in self._sent.items():
            if parameter.grad is not gradient or gradient._version != version:
                raise AssertionError(
                    f"the gradient of {self.names[parameter]!r} was changed on its way to the other ranks: call "
                    "optimizer.synchronize() before you clip or unscale gradients, and step in "
                    "optimizer.skip_synchronize()"
                )
        self.add_parameters()
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._sent:
                self._send(parameter)
        for parameter in self._sent:
            self._store(parameter)
        self.reset()
        self._is_synchronized = True

    def reset(self, *_: Any) -> None:
        """Waits for gradients on their way and forgets them, whatever became of them. A hook of `load_state_dict`."""
        for sent in self._sent.values():
            with contextlib.suppress(HorovodInternalError):
                sent[2].wait()
        self._sent.clear()
        self.set_passes(self._passes)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._sent:
            raise AssertionError(
                f"gradients of {self.names[parameter]!r} were computed more than backward_passes_per_step="
                f"{self._passes} times before step(): increase it to accumulate gradients locally"
            )
        self._is_synchronized = False
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._send(parameter)

    def _send(self, parameter: torch.Tensor) -> None:
        name, gradient, context = f"gradient.{self.names[parameter]}", parameter.grad, None
        op, before, after, group = self._options
        if gradient is None:
            # Another rank may have a gradient of this parameter.
            parameter.grad = gradient = torch.zeros_like(parameter)
        if gradient.requires_grad:
            raise AssertionError(f"the gradient of {self.names[parameter]!r} has create_graph: use torch.autograd.grad")
        if gradient.is_sparse and not self._sparse_as_dense:
            request = sparse_allreduce_async(gradient, name, op, group)
        else:
            # `detach` would count the reduction's writes as changes by the user.
            dense = gradient.to_dense() if gradient.is_sparse else gradient.data
            compressed, context = self._compression.compress(dense)
            request = allreduce_async_(compressed, None, name, op, before, after, group)
        self._sent[parameter] = gradient, gradient._version, request, context

    def _store(self, parameter: torch.Tensor) -> None:
        gradient, _, request, context = self._sent[parameter]
        reduced = request.wait()
        if not reduced.is_sparse:
            reduced = self._compression.decompress(reduced, context)
        if gradient.is_sparse:
            parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse(gradient.sparse_dim())
        elif reduced.data_ptr() != gradient.data_ptr():
            gradient.copy_(reduced)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = WORLD
) -> None:
    """Copies the parameters of ``root_rank`` to all ranks, in place.

    ``params`` is ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors. A parameter of another
    shape or type on another rank is a MismatchError.
    """
    parts = enumerate(params.items() if isinstance(params, Mapping) else params)
    pairs = [part if isinstance(part, tuple) else (str(index), part) for index, part in parts]
    sent = [(name, value) for name, value in pairs if value is not None]
    synchronize([broadcast_async_(value, root_rank, f"parameter.{name}", process_set) for name, value in sent])


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None, process_set: ProcessSet = WORLD
) -> None:
    """Copies the ``state_dict`` of one rank's optimizer to all ranks, also into new optimizers without state.

    ``model`` is unused, and accepted for compatibility.
    """
    state = broadcast_state(optimizer.state_dict(), root_rank, "optimizer.state", process_set)
    if WORLD.rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_state(state: Any, root_rank: int, name: str, process_set: ProcessSet = WORLD) -> Any:
    """Returns the state of one rank on every rank. Its tensors arrive on the CPU; ``load_state_dict`` moves them."""
    is_root, file = WORLD.rank() == root_rank, io.BytesIO()
    if is_root:
        torch.save(state, file, pickle_module=cloudpickle)
    data = broadcast_object(file.getvalue(), root_rank, name, process_set)
    return state if is_root else torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
