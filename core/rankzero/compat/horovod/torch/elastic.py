"""`hvd.elastic`: states that survive a failure, by rankzero's attempts and checkpoints.

Horovod keeps the processes and creates a new ring. rankzero starts the next attempt (``max_restarts``), in which `run`
restores the last commit.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

import rankzero.train as rt
from rankzero.compat.horovod.torch import world
from rankzero.compat.horovod.torch.collectives import barrier
from rankzero.compat.horovod.torch.optimizer import broadcast_state
from rankzero.train.context import await_checkpoint

_numbers = itertools.count(1)
"""Numbers of the states of this process, which are made in the same order in each attempt."""


class ElasticSampler(Sampler[int]):
    """Yields this rank's share, ``indices``, of the ``remaining_indices``, which no rank has processed in this epoch.

    ``dataset`` has a length. With ``shuffle`` each epoch has a new order, by ``seed``. Every rank has ``num_samples``
    indices, so that some are taken twice. ``processed_num`` counts those of all ranks, if they go at the same pace.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed, self.epoch, self.processed_num = dataset, shuffle, seed, 0, 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts a new epoch, in which no index is processed."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that each rank has processed a batch."""
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def reset(self) -> None:
        """Shares out the remaining indices among the current ranks."""
        generator, count = torch.Generator("cpu").manual_seed(self.seed + self.epoch), len(self.dataset)
        order = torch.randperm(count, generator=generator, device="cpu").tolist() if self.shuffle else range(count)
        self.remaining_indices = left = list(order[self.processed_num :])
        self.num_replicas, self.rank = (world.size(), world.rank()) if world.is_initialized() else (1, 0)
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = [left[at % len(left)] for at in range(self.rank, self.total_size, self.num_replicas)]

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the number of processed indices."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets the epoch and the number of processed indices, and shares out the rest."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class ObjectState:
    """A state of the named attributes, from which a training resumes.

    A value with a ``state_dict``, such as a scheduler, is saved by it. The first two arguments are unused.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        self._number, self._is_used = next(_numbers), False
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._parts: Mapping[str, Any] = dict.fromkeys(kwargs)
        vars(self).update(kwargs)
        # Not a subclass's own method, whose attributes are not there yet.
        ObjectState.save(self)

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Registers functions to call when the world may have changed, before the training resumes."""
        self._reset_callbacks.extend(callbacks)

    def reset(self) -> None:
        """Adapts a subclass to a world that may have changed; does nothing by default."""

    def check_host_updates(self) -> None:
        """Does nothing, since the world changes only between attempts."""

    def save(self) -> None:
        """Saves copies of the attributes, or of their ``state_dict``, in memory."""
        self._parts = copy.deepcopy(self._states())

    def restore(self) -> None:
        """Restores the attributes from the last `save`."""
        self._load(copy.deepcopy(self._parts))

    def sync(self) -> None:
        """Sends rank 0's attributes to every rank, and saves them."""
        self._load(broadcast_state(self._states(), 0, "elastic.values"))
        self.save()

    def commit(self) -> None:
        """Saves the state, and makes it the checkpoint that the next attempt starts from.

        Returns on every rank once the checkpoint is durable, whatever happens to any rank after that. If the store
        refuses it, this is logged and the previous commit stays. Raises TypeError for a subclass without attributes.
        """
        if not self._parts and type(self).save is not ObjectState.save:
            raise TypeError(f"{type(self).__name__} has no attributes to commit: give them to ObjectState by keyword")
        self.save()
        self._is_used = True
        kept = {"number": self._number, "parts": self._parts}
        rt.report({}, checkpoint={"elastic": kept} if world.rank() == 0 else None)
        await_checkpoint()
        barrier()

    def resume(self) -> None:
        """Restores the last commit of this state in an earlier attempt, unless this attempt has used the state."""
        is_used, self._is_used = self._is_used, True
        if is_used or (checkpoint := rt.get_checkpoint()) is None:
            return
        saved = checkpoint.load()
        kept = saved.get("elastic", {}) if isinstance(saved, Mapping) else {}
        if kept.get("number") != self._number or kept["parts"].keys() != self._parts.keys():
            print("rankzero: an elastic state starts afresh: the last checkpoint is not its commit", flush=True)
            return
        self._parts = kept["parts"]
        self.restore()
        for adapt in (self.reset, *self._reset_callbacks):
            adapt()

    def _states(self) -> dict[str, Any]:
        values = ((name, getattr(self, name)) for name in self._parts)
        return {name: value.state_dict() if hasattr(value, "load_state_dict") else value for name, value in values}

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if hasattr(value := getattr(self, name), "load_state_dict"):
                value.load_state_dict(state)
            else:
                # A tensor of another rank, or of a checkpoint, is on the CPU.
                are_tensors = isinstance(value, torch.Tensor) and isinstance(state, torch.Tensor)
                setattr(self, name, state.to(value.device) if are_tensors else state)


class TorchState(ObjectState):
    """A state of a model, an optimizer, and further attributes, such as samplers and numbers."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs, model=model, optimizer=optimizer)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``train(state, ...)`` to start from the last commit of an earlier attempt.

    A failure ends the attempt. If ``max_restarts`` allows another one (the default is 0), that starts from the last
    ``state.commit()``, with whatever number of ranks it has.
    """

    @functools.wraps(function)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        state.resume()
        state.sync()
        return function(state, *args, **kwargs)

    return wrapper
