"""`TensorBoard`: event files in the run directory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import store
from rankzero.advice import require
from rankzero.tracking.tracker import Folder, Row, Rows, Tracker

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus

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
        self._folder = Folder(run, FOLDER)
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
