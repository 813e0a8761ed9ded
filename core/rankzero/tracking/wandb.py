"""`WandB`: each training is a run of Weights & Biases, written offline into the run directory."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import bounds
from rankzero.advice import require
from rankzero.tracking.tracker import Folder, Rows, Tracker, training_of

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus

FOLDER = "wandb"


@dataclass(eq=False)
class WandB(Tracker):
    """Writes an offline run of Weights & Biases into the folder ``wandb`` of the run directory.

    ``wandb sync RUN_DIRECTORY/wandb/offline-run-*`` uploads it to a server; no other data leaves the host. The config
    holds the arguments. A training that is resumed is written again from its beginning, under the same id. A later
    training under the same run id has its own folder, ``training-N/wandb``.

    Attributes:
        project: Name of the project.
        ranks: Ranks whose reports are logged; None for all. Metrics of ranks other than 0 are named ``loss/rank-3``.

    Example:
        >>> from rankzero import Launcher
        >>> launcher = Launcher(2, trackers=[WandB("digits")])
    """

    project: str = "rankzero"
    ranks: Collection[int] | None = (0,)

    # A training that is resumed writes all its rows again.
    is_idempotent = True

    def check(self) -> None:
        """Raises InvalidJobError if wandb is not installed."""
        require("trackers has WandB, which needs", "wandb", "wandb")

    def begin(self, run: RunHandle[Any]) -> None:
        """Starts an offline run of W&B in an empty folder."""
        import wandb

        self._folder = Folder(run, FOLDER)
        self._rows = Rows(self.ranks)
        self._run = wandb.init(
            project=self.project,
            id=training_of(run.directory, run.fresh_since),
            name=run.id,
            config=run.params,
            tags=[f"{name}:{value}"[:64] for name, value in run.labels.items()],
            # wandb creates the folder `FOLDER` in this directory.
            dir=os.path.dirname(self._folder.path),
            mode="offline",
            reinit="create_new",
            # The run directory already has the output of the ranks and the metrics of their hosts.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Logs the reports of ranks."""
        for row in self._rows.of(events):
            named = {name if row.rank == 0 else f"{name}/rank-{row.rank}": value for name, value in row.metrics.items()}
            self._run.log({**named, "step": row.step, "_timestamp": row.time})
        self._folder.upload()

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Ends the run of W&B and uploads its files."""
        try:
            self._run.finish(exit_code=0 if status.state == "succeeded" else 1)
            # W&B's service writes most of the file after that, and gives no notice.
            deadline = time.monotonic() + bounds.TRACKERS_TIMEOUT
            while not _has_ended(self._run.settings.sync_file) and time.monotonic() < deadline:
                time.sleep(bounds.POLL_INTERVAL_BRIEF)
        finally:
            self._folder.close()


_BLOCK = 1 << 15
"""Bytes of a block of W&B's files, which have the format of LevelDB's logs behind a header of seven bytes."""

_HEAD = struct.Struct("<IHB")
"""The head of a record, or of a piece of one: checksum, length, and kind."""

_FULL, _FIRST, _LAST = 1, 2, 4


def _has_ended(path: str) -> bool:
    """Returns True if an offline run contains the record of its end, which is the last one."""
    from wandb.proto.wandb_internal_pb2 import Record

    with open(path, "rb") as file:
        # The record is small, so at most the last two blocks have pieces of it.
        start = max(0, (file.seek(0, os.SEEK_END) // _BLOCK - 1) * _BLOCK)
        file.seek(start)
        data = file.read()
    at, record, found = 0 if start else _HEAD.size, b"", False
    while (end := at + _HEAD.size) <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at = end + length
        if kind in (_FULL, _FIRST):
            record = data[end:at]
        elif record:
            record += data[end:at]
        found = (
            kind in (_FULL, _LAST) and bool(record) and at <= len(data) and Record.FromString(record).HasField("exit")
        )
    return found
