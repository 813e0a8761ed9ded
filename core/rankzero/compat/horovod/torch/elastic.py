"""`hvd.elastic`: states that survive a failure, by rankzero's attempts and checkpoints.

Horovod keeps the processes and creates a new ring. rankzero starts the next attempt (``max_restarts``), in which `run`
restores the last commit.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

import rankzero.train as rt
from rankzero.compat.horovod.torch import world
from rankzero.compat.horovod.torch.ops import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from rankzero.compat.horovod.torch.world import init, shutdown
from rankzero.train.context import await_checkpoint

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]

_NAME = "rankzero.compat.horovod.torch.elastic"

__path__: list[str] = []
"""Makes this module a package for the import system: Horovod's submodules ``state`` and ``sampler`` are this one."""

if __name__ != _NAME:
    # ``rankzero.compat.horovod.common.elastic``, which the import system finds by this file, too.
    sys.modules[__name__] = importlib.import_module(_NAME)

R = TypeVar("R")

_committed: rt.TrainContext | None = None
"""The attempt in which this rank made its last commit."""

_numbered: tuple[Any, int] = (None, 0)
"""The current attempt, and the number of its last state."""


class ElasticSampler(Sampler[int]):
    """Yields this rank's share of the indices that no rank has processed in this epoch.

    Args:
        dataset: A data set with a length.
        shuffle: Whether each epoch has a new order.
        seed: Seed of the order.

    Attributes:
        processed_indices: Indices that this rank knows to be processed in this epoch.
        remaining_indices: Remaining indices of all ranks, in the order of the epoch.
        indices: This rank's indices, as many as every other rank's (``num_samples``): some are taken twice.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed, self.epoch = dataset, shuffle, seed, 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts a new epoch, in which no index is processed."""
        self.epoch, self.processed_indices = epoch, set()
        self.reset()

    @property
    def processed_num(self) -> int:
        """Returns the number of indices that all ranks have processed in this epoch, if they go at the same pace."""
        own = len(self.processed_indices) - self._shared_out
        return min(self._shared_out + own * self.num_replicas, len(self.dataset))

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that this rank has processed a batch."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Any) -> None:
        """Records that this rank has processed some indices."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Shares out the remaining indices among the current ranks."""
        self._shared_out = len(self.processed_indices)
        self.remaining_indices = left = self._in_order(
            [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        )
        self.num_replicas, self.rank = (world.size(), world.rank()) if world.is_initialized() else (1, 0)
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = [left[at % len(left)] for at in range(self.rank, self.total_size, self.num_replicas)]

    def _in_order(self, indices: list[int]) -> list[int]:
        """Returns the indices in the order of the epoch."""
        if not self.shuffle:
            return indices
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        return [indices[at] for at in torch.randperm(len(indices), generator=generator, device="cpu").tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the processed indices, as a sorted tensor since there may be millions."""
        indices = torch.tensor(list(self.processed_indices), dtype=torch.int64)
        return {"epoch": self.epoch, "processed_indices": indices.sort().values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the epoch and the processed indices, and shares out the rest.

        Args:
            state: The result of `state_dict`; or Horovod's, which has ``processed_num`` in place of the indices: that
                many of the epoch's order are processed.
        """
        self.epoch, indices = state["epoch"], state.get("processed_indices")
        if indices is None:
            indices = self._in_order(list(range(len(self.dataset))))[: state["processed_num"]]
        self.processed_indices = set(indices.tolist() if isinstance(indices, torch.Tensor) else indices)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def _of_all_ranks(state: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a sampler's state with rank 0's epoch, and the indices that all ranks have processed in it."""
    states = allgather_object(state, f"elastic.{name}")
    epoch = states[0]["epoch"]
    indices = torch.cat([each["processed_indices"] for each in states if each["epoch"] == epoch])
    return {"epoch": epoch, "processed_indices": torch.unique(indices)}


class State:
    """A state from which a training resumes. Subclasses define how it is saved, restored and sent to all ranks.

    A subclass that overrides `save` keeps the saved values in attributes. A commit stores all attributes without a
    ``state_dict``; the next attempt sets them and calls `restore`.

    Args:
        bcast_object: Function that broadcasts objects in `sync` of a subclass; None: `broadcast_object`.
        get_rank: Function that returns the rank; None: ``hvd.rank``.
    """

    _number = 0

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object, self._rank = bcast_object or broadcast_object, get_rank or world.rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Registers functions to call when the world may have changed, before the training resumes."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapts a subclass to a world that may have changed; does nothing by default."""

    def commit(self) -> None:
        """Saves the state, and makes it the checkpoint that the next attempt starts from.

        Returns on every rank once the checkpoint is durable, whatever happens to any rank after that. If the store
        refuses the checkpoint, a message is logged and the previous commit stays.
        """
        global _committed
        self.save()
        committed = {"elastic": self.saved(), "number": self.number()}
        rt.report({}, checkpoint=committed if world.rank() == 0 else None)
        await_checkpoint()
        broadcast_object(None, name="elastic.committed")
        _committed = rt.get_context()

    def number(self) -> int:
        """Returns the number of this state, counted in the order of first use: the same in each attempt."""
        global _numbered
        if not self._number:
            context = rt.get_context()
            self._number = _numbered[1] + 1 if _numbered[0] == context else 1
            _numbered = context, self._number
        return self._number

    def check_host_updates(self) -> None:
        """Does nothing, since the world changes only between attempts."""

    def save(self) -> None:
        """Saves the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state from the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sends rank 0's state to every rank."""
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """Returns the values from the last `save`, for a checkpoint; samplers' with the indices of all ranks."""
        internal = {"_reset_callbacks", "_bcast_object", "_rank", "_values", "_states", "_number"}
        own = {} if type(self).save.__module__ == __name__ else vars(self)
        attributes = {name: value for name, value in own.items() if name not in internal and not _is_part(value)}
        parts = dict(vars(self).get("_states", {}))
        for name in parts:
            if isinstance(getattr(self, name), ElasticSampler):
                parts[name] = _of_all_ranks(parts[name], name)
        return {"attributes": attributes, "values": vars(self).get("_values", {}), "parts": parts}

    def load(self, saved: dict[str, Any]) -> None:
        """Sets the values of `saved` in a later attempt, and restores the state from them."""
        vars(self).update(saved["attributes"], _values=saved["values"], _states=saved["parts"])
        self.restore()


class ObjectState(State):
    """A state of attributes with plain values.

    Args:
        bcast_object: Function that broadcasts objects; None: `broadcast_object`.
        get_rank: Function that returns the rank; None: ``hvd.rank``.
        kwargs: Names and values of the attributes.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._values = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        # The method of this class, since a subclass has no attributes yet.
        ObjectState.save(self)

    def save(self) -> None:
        """Saves copies of the attributes in memory."""
        self._values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}

    def restore(self) -> None:
        """Sets the attributes to the values of the last `save`."""
        for name, value in self._values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Sets rank 0's attributes on every rank."""
        values = {name: getattr(self, name) for name in self._values}
        for name, value in broadcast_object(values, name="elastic.values").items():
            setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """A state of a model, an optimizer, samplers, and attributes with plain values.

    Args:
        model: A module.
        optimizer: The optimizer of its parameters.
        kwargs: Names and values; a value with a ``state_dict``, such as a scheduler, is saved by it.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._states: dict[str, Any] = {}
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        values, states = vars(self).get("_values", {}), vars(self).get("_states", {})
        if _is_part(value) and (name in values or name in states):
            # The state that `restore` sets.
            states[name] = copy.deepcopy(value.state_dict())
            values.pop(name, None)
        elif name in states:
            values[name] = None
            del states[name]

    def save(self) -> None:
        """Saves copies of the attributes and of each ``state_dict`` in memory."""
        super().save()
        self._states = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._states}

    def restore(self) -> None:
        """Restores the attributes and each ``state_dict`` from the last `save`."""
        super().restore()
        for name, state in self._states.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))

    def sync(self) -> None:
        """Sends rank 0's state to every rank; samplers get the indices that all ranks have processed."""
        for name in self._states:
            part = getattr(self, name)
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict())
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part)
            elif isinstance(part, ElasticSampler):
                part.load_state_dict(_of_all_ranks(part.state_dict(), name))
            else:
                part.load_state_dict(broadcast_object(part.state_dict(), name=f"elastic.{name}"))
        super().sync()


def _is_part(value: object) -> bool:
    """Returns True if a value is saved by its own ``state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _saved(checkpoint: Any, state: State) -> Any:
    """Returns the values that a checkpoint has for a state. Raises ValueError if it is of another state."""
    if not isinstance(checkpoint, Mapping) or "elastic" not in checkpoint:
        raise ValueError(
            "the last checkpoint is of rt.report, not of state.commit(): report no checkpoints together with commits"
        )
    own, kept = vars(state), checkpoint["elastic"]
    mine, theirs = {*own.get("_values", ()), *own.get("_states", ())}, {*kept["values"], *kept["parts"]}
    if mine != theirs:
        raise ValueError(
            f"the last commit is of a state with {', '.join(sorted(theirs))}, not {', '.join(sorted(mine))}: commit "
            "one state in a run"
        )
    if checkpoint["number"] != state.number():
        raise ValueError(
            f"the last commit is of state {checkpoint['number']} of the training, not of state {state.number()}: "
            "commit one state in a run"
        )
    return kept


def run(function: Callable[..., R]) -> Callable[..., R]:
    """Decorates ``train(state, ...)`` to start from the last commit of an earlier attempt.

    A failure ends the attempt. With ``max_restarts`` the next attempt starts from the last ``state.commit()``, with
    whatever number of ranks it has. Without ``max_restarts``, which is the default, a failure ends the run.

    Raises:
        ValueError: raised by the decorated function if the last commit is of a state with other names.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        state.number()
        # The state already has the values that this attempt has committed.
        if _committed != rt.get_context() and (checkpoint := rt.get_checkpoint()):
            state.load(_saved(checkpoint.load(), state))
            state.on_reset()
        state.sync()
        return function(state, *args, **kwargs)

    return wrapper
