"""`list_runs` lists the runs of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rankzero import store
from rankzero.errors import RankZeroError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.status import RunStatus


@dataclass(frozen=True)
class Listed:
    """Describes a run of a store.

    Attributes:
        directory: The run directory.
        job: Job of the last submission.
        status: Status of the run; its state is ``"failed"`` if the driver has died.
    """

    directory: str
    job: Job
    status: RunStatus


def list_runs(location: str | os.PathLike[str]) -> Iterator[Listed]:
    """Yields the runs of a store, in the order of their names. A directory that cannot be read as a run is left out.

    Args:
        location: Root of the run directories, a path or an fsspec URL.

    Raises:
        FileNotFoundError: there is no such directory.
        InvalidJobError: the store cannot hold runs.
    """
    root = store.normalize(os.fspath(location))
    if not store.is_url(root) and not os.path.isdir(root):
        raise FileNotFoundError(f"there is no directory {root}: give the root of run directories")
    for name in sorted(store.list_names(root)):
        directory = store.join(root, name)
        if name.startswith("."):
            continue
        try:
            yield Listed(directory, RunDirectory(directory).job(), RunHandle.attach(directory).status())
        except (RankZeroError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # The directory is claimed but not written, removed in part, or not rankzero's.
            continue
