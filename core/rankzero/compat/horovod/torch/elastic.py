"""`hvd.elastic`: a state that survives a failure, on rankzero's attempts and checkpoints.

Horovod keeps the processes and makes a new ring; rankzero starts the next attempt (``max_restarts``), which `run` lets
begin from the last commit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

import rankzero.train as rt
from rankzero.compat.horovod.torch import world
from rankzero.compat.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from rankzero.compat.horovod.torch.objects import allgather_object, broadcast_object

R = TypeVar("R")


class State:
    """What a training goes on from. Subclasses say how it is saved, restored and sent to all ranks."""

    def __init__(self, **kwargs: Any) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Functions to be called when the world may have changed, before the training goes on."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls them."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """What a subclass does when the world may have changed."""

    def commit(self) -> None:
        """Saves the state, and makes it the checkpoint that the next attempt begins with."""
        self.save()
        saved = self.of_all_ranks(self.saved())
        rt.report({}, checkpoint={"elastic": saved} if world.rank() == 0 else None)

    def check_host_updates(self) -> None:
        """Nothing: the world changes between attempts only."""

    def save(self) -> None:
        """Remembers the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what `save` remembered."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank what rank 0 has."""
        raise NotImplementedError

    def saved(self) -> Any:
        """What `save` remembered, for a checkpoint."""
        raise NotImplementedError

    def of_all_ranks(self, saved: Any) -> Any:
        """What `saved` gave, with what only other ranks know."""
        return saved

    def load(self, saved: Any) -> None:
        """Takes what `saved` gave, in a later attempt."""
        raise NotImplementedError


class ObjectState(State):
    """Attributes of plain values.

    Args:
        kwargs: Names and values.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._values = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Remembers the attributes."""
        self._values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}

    def restore(self) -> None:
        """Sets the attributes that were remembered."""
        for name, value in self._values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Sets rank 0's attributes on every rank."""
        self.save()
        self._values = broadcast_object(self._values, name="elastic.values")
        self.restore()

    def saved(self) -> Any:
        """The attributes."""
        return {"values": self._values}

    def load(self, saved: Any) -> None:
        """Sets the attributes."""
        self._values = saved["values"]
        self.restore()


class TorchState(ObjectState):
    """A model, an optimizer, samplers, and attributes of plain values.

    Args:
        model: A module.
        optimizer: Of its parameters.
        kwargs: Names and values; one with a ``state_dict`` is saved by it.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        parts = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._parts})
        for name, part in self._parts.items():
            setattr(self, name, part)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        """Remembers everything."""
        super().save()
        self._saved = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def restore(self) -> None:
        """Goes back to what was remembered."""
        super().restore()
        for name, state in self._saved.items():
            self._parts[name].load_state_dict(copy.deepcopy(state))

    def sync(self) -> None:
        """Gives every rank what rank 0 has; samplers learn what all ranks have processed."""
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict())
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part)
            elif isinstance(part, ElasticSampler):
                part.merge(allgather_object(part.state_dict(), "elastic.sampler"))
        super().sync()
        self.save()

    def saved(self) -> Any:
        """Everything."""
        return {**super().saved(), "parts": self._saved}

    def of_all_ranks(self, saved: Any) -> Any:
        """The indices that all ranks have processed."""
        parts = dict(saved["parts"])
        for name, part in self._parts.items():
            if isinstance(part, ElasticSampler):
                states = allgather_object(part.state_dict(), f"elastic.commit.{name}")
                done = sorted({index for state in states for index in state["processed_indices"]})
                parts[name] = {**parts[name], "processed_indices": done}
        return {**saved, "parts": parts}

    def load(self, saved: Any) -> None:
        """Sets everything."""
        self._saved = saved["parts"]
        super().load(saved)


class ElasticSampler(Sampler[int]):
    """This rank's share of the indices that no rank has processed in this epoch.

    Args:
        dataset: With a length.
        shuffle: Another order in each epoch.
        seed: Of the order.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """A new epoch, in which nothing is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that this rank has processed a batch."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Any) -> None:
        """Notes that this rank has processed indices."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Shares out what is left."""
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            left = [left[place] for place in torch.randperm(len(left), generator=generator).tolist()]
        size, rank = (world.size(), world.rank()) if world.is_initialized() else (1, 0)
        missing = -len(left) % size
        left += [left[index % len(left)] for index in range(missing)] if left else []
        self.indices = left[rank::size]

    def merge(self, states: list[dict[str, Any]]) -> None:
        """Notes what all ranks have processed."""
        for state in states:
            self.processed_indices.update(state["processed_indices"])
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and processed indices."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def run(function: Callable[..., R]) -> Callable[..., R]:
    """A decorator of ``train(state, ...)``: begins from the last commit of an earlier attempt.

    A failure ends the attempt; with ``max_restarts`` the next one begins from the last ``state.commit()``, with as many
    ranks as there are then.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if checkpoint := rt.get_checkpoint():
            state.load(checkpoint.load()["elastic"])
            state.on_reset()
        state.sync()
        return function(state, *args, **kwargs)

    return wrapper
