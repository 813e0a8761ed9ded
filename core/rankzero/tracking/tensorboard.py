"""`TensorBoard`: event files in the run directory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import bounds, store
from rankzero.errors import require
from rankzero.tracking.tracker import Row, Rows, Tracker

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus

TRACKER_UPLOAD_INTERVAL = bounds.scaled(60.0)  # Least seconds between two uploads to an object store

FOLDER = "tensorboard"


@dataclass(eq=False)
class TensorBoard(Tracker):
    """Writes the reports of ranks as event files into the folder ``tensorboard`` of the run directory.

    ``tensorboard --logdir STORE`` shows all runs of a store side by side. They are kept and removed with their run; a
    later training under the same run id has its own folder, ``training-N/tensorboard``. On an object store they are
    written once a minute, and when the run has ended. Needs the package ``tensorboard``, and not TensorFlow.

    Attributes:
        ranks: Ranks whose reports are written; None for all. Each rank is a run ``rank-N``.

    Example:
        >>> from rankzero import Launcher
        >>> launcher = Launcher(2, trackers=[TensorBoard()])  # then: tensorboard --logdir ~/.rankzero/runs
    """

    ranks: Collection[int] | None = (0,)

    # A training that is resumed writes all its rows again.
    is_idempotent = True

    def check(self) -> None:
        """Raises InvalidJobError if tensorboard is not installed."""
        require("trackers has TensorBoard, which needs", "tensorboard", "tensorboard")

    def begin(self, run: RunHandle[Any]) -> None:
        """Opens an empty folder of event files."""
        self._folder = _Folder(run)
        self._rows = Rows(self.ranks)
        self._writers: dict[int, Any] = {}

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Writes the reports of ranks."""
        for row in self._rows.of(events):
            self._write(row)
        for writer in self._writers.values():
            writer.flush()
        self._folder.upload()

    def _write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if row.rank not in self._writers:
            self._writers[row.rank] = EventFileWriter(store.join(self._folder.path, f"rank-{row.rank}"))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
        self._writers[row.rank].add_event(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Closes the event files and uploads them."""
        try:
            for writer in self._writers.values():
                writer.close()
        finally:
            self._folder.close()


class _Folder:
    """The folder of one training's event files; on an object store a copy of it on this host.

    It lies in the run directory, or in its folder ``training-N`` if the directory held another training before: the
    folders of earlier trainings stay. A training that is resumed is written again, so its own folder is emptied.
    """

    def __init__(self, run: RunHandle[Any]) -> None:
        first = int(run.training.partition("-")[0])
        self._location = location = store.join(run.directory, *([f"training-{first:04d}"] if first else []), FOLDER)
        self._scratch = tempfile.TemporaryDirectory(prefix="rankzero-") if store.is_url(location) else None
        self.path = self._scratch.name if self._scratch else location
        self._uploaded = time.monotonic()
        self._sizes: dict[str, int] = {}
        store.remove(location)
        os.makedirs(self.path, exist_ok=True)

    def upload(self, *, now: bool = False) -> None:
        """Copies what has grown to the object store, now and then. Raises OSError and the store's own errors."""
        if self._scratch and (now or time.monotonic() - self._uploaded > TRACKER_UPLOAD_INTERVAL()):
            self._uploaded = time.monotonic()
            for folder, _, names in os.walk(self.path):
                for name in names:
                    path = os.path.join(folder, name)
                    size = os.path.getsize(path)
                    if self._sizes.get(path) != size:
                        store.upload(path, store.join(self._location, os.path.relpath(path, self.path)))
                        self._sizes[path] = size

    def close(self) -> None:
        """Uploads the rest, and removes the copy."""
        try:
            self.upload(now=True)
        finally:
            if self._scratch:
                self._scratch.cleanup()
