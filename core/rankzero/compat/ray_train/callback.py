"""`UserCallback`: code of the user that follows the reports and failures of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankzero.compat.ray_train.checkpoint import Checkpoint
    from rankzero.train import TrainContext

installed: list[UserCallback] = []
"""The callbacks of this worker."""


class UserCallback:
    """Base of the callbacks in ``RunConfig(callbacks=[...])``.

    Each worker has a copy of the object. Ray calls callbacks in its controller; here rank 0 calls `after_report`, and a
    worker that raises calls `after_exception`. An exception of a callback is one of the training.
    """

    def after_report(
        self, run_context: TrainContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Called on rank 0 when all workers have called ``train.report``, and its checkpoint is committed.

        Args:
            run_context: The run: ``run_id``, ``attempt``, ``world_size``.
            metrics: Metrics of each worker, by rank.
            checkpoint: The checkpoint of this report; None if there is none.
        """

    def after_exception(self, run_context: TrainContext, worker_exceptions: dict[int, Exception]) -> None:
        """Called in a worker whose training function has raised an exception; a worker that is killed calls nothing.

        Args:
            run_context: The run, as for `after_report`.
            worker_exceptions: The exception by the rank of the worker.
        """
