"""`WandB`: each training is a run of Weights & Biases, written offline into the run directory."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero.tracking.tracker import Folder, Rows, Tracker, require, training_of

if TYPE_CHECKING:
    from rankzero.run.directory import RunStatus
    from rankzero.run.handle import RunHandle

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
        require("wandb", "wandb", self)

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
        finally:
            self._folder.close()
