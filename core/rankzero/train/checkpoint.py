"""A committed checkpoint, as the ranks of an attempt open it."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.errors import ResultError
from rankzero.train import sharded
from rankzero.values import formats

if TYPE_CHECKING:
    from rankzero.train.parts import Part, Parts


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of this run, whatever the world size of the attempt that wrote it.

    A whole checkpoint (rank 0's) is the same for every rank of any world. A sharded checkpoint of states with DTensors
    can be read by a world of any size. Others are read by a world of the same size, or part by part.

    Attributes:
        id: Name of the checkpoint.
        metrics: Metrics that rank 0 reported with it.
        world_size: Number of ranks that wrote it.
        sharded: Whether every rank wrote a part.
    """

    id: str
    metrics: dict[str, Any]
    world_size: int
    sharded: bool
    _rank: int = field(repr=False)
    _present_world_size: int = field(repr=False)
    _manifest: Mapping[str, Any] = field(repr=False)
    _files: Parts = field(repr=False)
    _note_damage: Callable[[], None] = field(repr=False)

    def load(self, rank: int | None = None, *, into: dict[Any, Any] | None = None) -> Any:
        """Returns the state that was passed to `rankzero.train.report`, with tensors on the CPU.

        A DTensor is returned whole, unless ``into`` has a DTensor for it. All other values of a sharded state are those
        of this rank, or of rank 0 if the checkpoint has no part of this rank.

        Args:
            rank: The rank whose part of a sharded checkpoint is loaded; None for this rank's.
            into: A state dict of the model that trains now, with the same names. Its tensors and DTensors are filled,
                on whatever device they are, and are the ones in the state that is returned. A rank reads its own part
                only, unless the world has another size or the tensors are sharded otherwise. Top-level keys that
                ``into`` lacks are left out if they hold DTensors.

        Raises:
            ResultError: the file is damaged or cannot be reached, the checkpoint is a directory or was written by
                another world and cannot be resharded, or ``into`` has other tensors.

        Example:
            >>> import torch
            >>> import rankzero.train as rt
            >>> model = torch.nn.Linear(2, 2)
            >>> if checkpoint := rt.get_checkpoint():
            ...     state = checkpoint.load(into={"model": model.state_dict()})
        """
        with self._still_there():
            name, part = self._part(rank)
            if part["format"] == formats.DIRECTORY:
                raise ResultError(f"checkpoint {self.id} is a directory: use as_directory() or to_directory(path)")
            if part["format"] == formats.SHARDS:
                others = [int(each) for each in self._all if each != name]
                is_same_world = self.world_size == self._present_world_size
                return sharded.load(int(name), others, self._read, into, is_same_world=is_same_world)
            found = self._read(int(name), part["format"])
        return found if into is None else sharded.load(0, [], lambda _: found, into)

    def to_directory(self, path: str | os.PathLike[str], rank: int | None = None) -> str:
        """Copies a checkpoint that was reported as a directory, and returns the path of the copy.

        Args:
            path: Local directory, which is created if it does not exist.
            rank: The rank whose part of a sharded checkpoint is copied; None for this rank's.

        Raises:
            ResultError: the file is damaged or cannot be reached, the checkpoint is a state, or it was written by
                another world and cannot be resharded.
        """
        target = os.fspath(path)
        with self._still_there():
            name, part = self._part(rank)
            if part["format"] != formats.DIRECTORY:
                raise ResultError(f"checkpoint {self.id} is a state, not a directory: use load()")
            os.makedirs(target, exist_ok=True)
            formats.read_directory(self._files.path(self.id, name, part), part["sha256"], target)
        return target

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yields a temporary local copy as `to_directory` makes it, and removes it at the end of the block."""
        # The agent has checked that this directory has room.
        scratch = os.environ.get("RANKZERO_SCRATCH")
        with tempfile.TemporaryDirectory(prefix="rankzero-checkpoint-", dir=scratch) as directory:
            yield self.to_directory(directory)

    @contextlib.contextmanager
    def _still_there(self) -> Iterator[None]:
        self._files.is_being_read = True
        try:
            yield
        except ResultError as error:
            if error.is_damage:
                self._note_damage()
                raise ResultError(
                    f"checkpoint {self.id} is damaged, so the next attempt starts from the one before it: {error}"
                ) from error
            raise
        except FileNotFoundError:
            raise ResultError(
                f"checkpoint {self.id} was deleted, since it is not kept: call get_checkpoint() for the newest one"
            ) from None
        finally:
            self._files.is_being_read = False

    @functools.cached_property
    def _all(self) -> Mapping[str, Part]:
        return self._files.all_of(self._manifest)

    def _part(self, rank: int | None = None) -> tuple[str, Part]:
        """Returns the rank, as text, and the facts of the part that ``load(rank)`` reads."""
        is_resharded = formats.SHARDS in self._manifest["formats"]
        if rank is None and self.sharded and not is_resharded and self.world_size != self._present_world_size:
            raise ResultError(
                f"checkpoint {self.id} has a part of each of {self.world_size} ranks, and this world has "
                f"{self._present_world_size}: choose one, load(rank=...); or report states with DTensors (FSDP2), "
                "which a world of any size can load"
            )
        chosen = self._rank if rank is None else rank
        name = str(chosen) if self.sharded and chosen < self.world_size else "0"
        return name, self._facts(name)

    def _facts(self, name: str) -> Part:
        return self._manifest["parts"].get(name) or self._all[name]

    def _read(self, rank: int, file_format: str = formats.PICKLE) -> Any:
        part = self._facts(str(rank))
        return formats.read(self._files.path(self.id, str(rank), part), file_format, part["sha256"])
