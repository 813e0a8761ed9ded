"""`DatasetShard`: a rank's share of the rows of a dataset that the launcher was given; and what counts its epochs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero.data.manifest import Manifest, from_bytes
from rankzero.errors import InvalidJobError
from rankzero.kinds import COUNT, POSITIVE
from rankzero.train import context

if TYPE_CHECKING:
    import torch

    from rankzero.data.columns import Columns

DEFAULT = "train"
"""Name of a dataset that the launcher was given without one."""


def get_dataset_shard(name: str = DEFAULT) -> DatasetShard:
    """Returns this rank's share of a dataset that the launcher was given.

    Args:
        name: Name of the dataset; a dataset that was given without a name is ``"train"``.

    Raises:
        InvalidJobError: the launcher was given no dataset of this name.

    Example:
        >>> import rankzero.train as rt
        >>> def train(epochs: int) -> None:
        ...     shard = rt.get_dataset_shard()
        ...     for _ in range(epochs):
        ...         for batch in shard.iter_batches(1024, shuffle=True):
        ...             rt.report({"rows": len(batch["label"])})
    """
    session = context.current()
    shards = session.shards
    if name not in shards:
        manifests = from_bytes(pathlib.Path(session.datasets).read_bytes()) if session.datasets else {}
        if name not in manifests:
            known = ", ".join(sorted(manifests)) or "none"
            raise InvalidJobError(f"the launcher was given no dataset {name!r}; Launcher(dataset=...) has: {known}")
        shards[name] = DatasetShard(manifests[name], session.context, name)
    return shards[name]  # type: ignore[no-any-return]


@dataclass(eq=False)
class Position:
    """A position in an epoch, which an iteration moves.

    Attributes:
        epoch: Number of the epoch.
        loaded: State of the checkpoint at which the iteration begins; None for the beginning of the epoch.
        done: Batches of this iteration that were consumed.
        data: The data of the iteration; None before it begins.
    """

    epoch: int = 0
    loaded: Mapping[str, Any] | None = None
    done: int = 0
    data: Any = None


class Epochs:
    """The epochs of a loader or dataset: each iteration is a new one."""

    def __init__(self) -> None:
        self._at = Position()

    @property
    def epoch(self) -> int:
        """Returns the number of the epoch that is running, was left before its end or, between two, comes next."""
        return self._at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Optional: each iteration increases the epoch by one.

        A position that was loaded belongs to its epoch: that one is resumed, any other epoch begins at its first batch.
        """
        if epoch != self._at.epoch or self._at.data is not None:
            self._at = Position(epoch)

    def _begin(self, data: Any) -> Position:
        """Returns the position of an iteration over some data that begins now."""
        if self._at.data is not None:
            # The loop has left its epoch.
            self._at = Position(self._at.epoch + 1)
        self._at.data = data
        return self._at

    def _count(self, at: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iteration, and moves its position."""
        for batch in batches:
            at.done += 1
            # A loop within the loop, such as an evaluation, does not count.
            self._at = at
            yield batch
        self._at = Position(at.epoch + 1)


class DatasetShard(Epochs):
    """A rank's share of a dataset.

    The shares of ranks differ by one row at most, and have the same number of batches. Every iteration is an epoch.
    """

    def __init__(self, manifest: Manifest, world: context.TrainContext, name: str) -> None:
        """Prepares the share of a rank of this world without opening a file."""
        super().__init__()
        self._manifest = manifest
        self._world = world
        self._name = name

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of the whole dataset."""
        return self._manifest.rows

    @property
    def columns(self) -> list[str]:
        """Returns the names of the columns."""
        return list(self._manifest.arrow_schema().names)

    def __len__(self) -> int:
        """Returns the number of rows of this rank in an epoch."""
        from rankzero.data.shares import split

        low, high = split(self.num_rows, self._world.world_size, self._world.rank)
        return high - low

    def iter_batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        collate: Callable[[Columns], Any] | None = None,
        device: torch.device | str | None = None,
        prefetch: int = 1,
        pad: bool = True,
    ) -> Iterator[Any]:
        """Yields the batches of the next epoch: dicts with a tensor, or another value by its type, for each column.

        ``docs/data.md`` lists the value for each type of a column. Every rank gets the same number of batches, and
        every row is used once in an epoch. Only if a rank has fewer rows than batches (as in a last batch of a single
        row), one row is used twice, unless ``pad=False``.

        Args:
            batch_size: Rows of a batch of one rank.
            shuffle: Whether each epoch has a new random order of all rows, over all ranks. A dataset of more than
                128 MiB is shuffled in two steps: row groups, then the rows within windows of 128 MiB of them.
            seed: Seed of the orders.
            drop_last: Whether to leave out the last batch if it is smaller.
            columns: Names of the columns to read; None for all.
            collate: Makes a batch from the dict of columns.
            device: Device of the tensors; None for the rank's device.
            prefetch: Row groups, or pieces of about 16 MiB of a window, that a thread reads ahead; 0 for no thread.
            pad: False for scoring, where ranks do not wait for each other: no row is used twice, and a rank may have
                one batch less.

        Raises:
            InvalidJobError: no such column, or a batch size that is not a positive integer; while iterating: a null or
                an array of another length, which a tensor cannot hold.
            ResultError: while iterating: a file was removed or changed, or this host does not see it.
        """
        known = self.columns
        for column in columns if columns is not None else ():
            if column not in known:
                raise InvalidJobError(f"the dataset {self._name!r} has no column {column!r}; it has {', '.join(known)}")
        if columns is not None and (isinstance(columns, str) or not columns):
            raise InvalidJobError(f"columns is {columns!r}; give a list of names, or None for all columns")
        options = {
            "batch_size": POSITIVE.check("batch_size", batch_size),
            "seed": seed if shuffle else None,
            "drop_last": drop_last,
            "columns": columns,
            "collate": collate,
            "pad": pad,
            "prefetch": COUNT.check("prefetch", prefetch),
        }
        return self._iterate(options, device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, for a checkpoint. Every rank takes it at the same batch."""
        at = self._at
        if at.data is None:
            return dict(at.loaded or {"epoch": at.epoch, "consumed": [], "rows": self.num_rows})
        consumed = list(at.loaded["consumed"]) if at.loaded else []
        if at.done:
            consumed.append([self._world.world_size, at.data["batch_size"], int(at.data["drop_last"]), at.done])
        return {"epoch": at.epoch, "consumed": consumed, "rows": self.num_rows, "seed": at.data["seed"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes at the position of ``state``, with any number of ranks: the next iteration yields the rest.

        Raises:
            ValueError: the next iteration raises it for the state of another dataset, or of another order of the rows.
        """
        self._at = Position(state["epoch"], state)

    def _iterate(self, options: dict[str, Any], device: torch.device | str | None) -> Iterator[Any]:
        import torch

        from rankzero.data.shares import Stretch
        from rankzero.train.batches import batches_of, on_device

        place = self._world.device if device is None else torch.device(device)
        at = self._begin(options)
        state = at.loaded or {"consumed": [], "rows": self.num_rows}
        if state["rows"] != self.num_rows:
            raise ValueError(f"the state is that of a dataset of {state['rows']} rows; this one has {self.num_rows}")
        seeds = (state.get("seed", options["seed"]), options["seed"])
        if state["consumed"] and seeds[0] != seeds[1]:
            was, now = ("the order of the files" if seed is None else f"shuffle=True, seed={seed}" for seed in seeds)
            raise ValueError(
                f"the position is one in another order of the rows ({was}) than that of this iteration ({now}): some "
                "rows would come twice, and some never. Give the same shuffle and seed in every attempt"
            )
        consumed = [Stretch.from_json(values) for values in state["consumed"]]
        batches = batches_of(self._manifest, self._world, at.epoch, consumed, **options)
        yield from self._count(at, batches if place.type == "cpu" else on_device(batches, place))
