"""A committed checkpoint, as the ranks of an attempt open it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.values import formats, resharding

if TYPE_CHECKING:
    from rankzero.train.parts import ListedParts, Part, Parts


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of this run, whatever the world size of the attempt that wrote it.

    A whole checkpoint (rank 0's) is the same for every rank of any world. Sharded ones are read by a world of any size
    if they are states with DTensors, or directories of ``torch.distributed.checkpoint``: each rank gets what it needs.
    Parts that only the training understands are read by a world of the same size, or by number: ``world_size`` ranks
    wrote them, and `rankzero.train.get_context` knows how many there are now.

    Attributes:
        id: Its name.
        metrics: What rank 0 reported with it.
        world_size: Number of ranks that wrote it.
        sharded: Every rank gave a part of its own.
    """

    id: str
    metrics: dict[str, Any]
    world_size: int
    sharded: bool
    _rank: int = field(repr=False)
    _present_world_size: int = field(repr=False)
    _parts: ListedParts = field(repr=False)
    _files: Parts = field(repr=False)

    def load(self, rank: int | None = None, *, into: dict[Any, Any] | None = None) -> Any:
        """The state that was given to `rankzero.train.report`; tensors on the CPU.

        DTensors come as whole tensors, unless ``into`` has DTensors for them. What else a sharded state holds comes as
        this rank gave it, or as rank 0 did if there was no such rank.

        Args:
            rank: Whose part of a sharded checkpoint; None for this rank's.
            into: A state dict of the model that trains now, with the same names: its tensors and DTensors are filled,
                on whatever device they are, and are the ones in the state that is returned. Each rank reads only the
                pieces that it needs, however many ranks wrote them. Keys at the top that it lacks are left out if
                they hold DTensors.

        Raises:
            ResultError: the file is damaged or not within reach, or a directory was given; ranks of another world size
                wrote parts that cannot be cut anew; ``into`` has not what the checkpoint has, or has tensors that the
                checkpoint lacks.

        Example:
            >>> import torch
            >>> import rankzero.train as rt
            >>> model = torch.nn.Linear(2, 2)
            >>> if checkpoint := rt.get_checkpoint():
            ...     state = checkpoint.load(into={"model": model.state_dict()})
        """
        name, part = self._part(rank)
        if part["format"] in (formats.DIRECTORY, formats.DISTRIBUTED):
            raise ResultError(f"checkpoint {self.id} is a directory: use as_directory() or to_directory(path)")
        with self._still_there():
            if part["format"] == formats.SHARDS:
                indexes = self._files.indexes(self.id, self._parts)
                with resharding.ShardedState(self._parts, self._open, indexes) as state:
                    return state.load(name) if into is None else state.load_into(name, into)
            found = formats.read(self._path(name), part["format"], part["sha256"])
        return found if into is None else resharding.fill(into, found)

    def to_directory(self, path: str | os.PathLike[str], rank: int | None = None) -> str:
        """Copies a checkpoint that was given as a directory to ``path``, which is made if need be.

        Of what ``torch.distributed.checkpoint`` saved it has the files of all ranks, so that its ``load`` finds them.

        Args:
            path: Local directory.
            rank: Whose part of a sharded checkpoint; None for this rank's.

        Returns:
            The directory.

        Raises:
            ResultError: the file is damaged or not within reach, or a state was given; ranks of another world size
                wrote parts that cannot be cut anew.
        """
        name, part = self._part(rank)
        if part["format"] not in (formats.DIRECTORY, formats.DISTRIBUTED):
            raise ResultError(f"checkpoint {self.id} is a state, not a directory: use load()")
        target = os.fspath(path)
        os.makedirs(target, exist_ok=True)
        with self._still_there():
            for each in self._parts if rank is None and self._is_cut_anew else [name]:
                formats.read_directory(self._path(each), self._parts[each]["sha256"], target)
        return target

    @contextlib.contextmanager
    def as_directory(self, rank: int | None = None) -> Iterator[str]:
        """A temporary local copy, removed at the end of the block. Like `to_directory`."""
        # Where its agent has room.
        scratch = os.environ.get("RANKZERO_SCRATCH")
        with tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-", dir=scratch) as directory:
            yield self.to_directory(directory, rank)

    @contextlib.contextmanager
    def _still_there(self) -> Iterator[None]:
        try:
            with self._files.reading():
                yield
        except FileNotFoundError:
            raise ResultError(
                f"checkpoint {self.id} is not kept any more: ask get_checkpoint() for the newest"
            ) from None

    @property
    def _is_cut_anew(self) -> bool:
        """A world of any size can read it."""
        return not self._parts.formats.isdisjoint((formats.SHARDS, formats.DISTRIBUTED))

    def _part(self, rank: int | None) -> tuple[str, Part]:
        """Rank, as text, and facts of the part that is asked for."""
        if not self.sharded:
            return "0", self._parts["0"]
        if rank is None and self._is_cut_anew:
            rank = self._rank if str(self._rank) in self._parts else 0
        elif rank is None and self.world_size != self._present_world_size:
            raise ResultError(
                f"checkpoint {self.id} has a part of each of {self.world_size} ranks, and this world has "
                f"{self._present_world_size}: choose one, load(rank=...); or report states with DTensors (FSDP2), "
                "which a world of any size can load"
            )
        name = str(self._rank if rank is None else rank)
        if name not in self._parts:
            raise ResultError(f"checkpoint {self.id} of {self.world_size} ranks has no part of rank {name}")
        return name, self._parts[name]

    def _path(self, name: str) -> str:
        return self._files.path(self.id, name, self._parts[name])

    def _open(self, name: str) -> Any:
        return self._files.open(self.id, name, self._parts[name])
