"""`Result`: the outcome of a run of the trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from rankzero.compat.ray_train.checkpoint import Checkpoint, Stored, as_arrow
from rankzero.errors import RankZeroError, RunNotFoundError, WorkerFailedError
from rankzero.job import MODES
from rankzero.run.checkpoints import score
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle


@dataclass(frozen=True)
class Result:
    """The outcome of a run: metrics, checkpoints, error and value.

    Attributes:
        metrics: Metrics of rank 0's last report; None if there was none.
        checkpoint: The newest checkpoint; None if there is none.
        error: The error of a failed run; None after a success.
        path: The run directory.
        best_checkpoints: The kept checkpoints with the metrics of their reports. By ``checkpoint_score_attribute`` the
            best is the last one; without it the newest is.
        return_value: The value that the training function returned on rank 0, which may contain tensors.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    return_value: Any = None

    @property
    def metrics_dataframe(self) -> Any:
        """Returns rank 0's reports as a `pandas.DataFrame`."""
        import pandas

        reports = _reports(RunHandle[Any].attach(self.path, follows=False))
        return pandas.DataFrame([{"time": event["time"], **event["metrics"]} for event in reports])

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the run directory, on which ``path`` is without the prefix of a URL."""
        return Checkpoint(self.path).filesystem

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Returns the result of a run from its directory, whichever process started it; of one that lives, so far.

        Args:
            path: Path or URL of the run directory.
            storage_filesystem: Refused, unless it is this machine's.

        Raises:
            RuntimeError: the directory has no run.
            TypeError: another filesystem was given.
        """
        if storage_filesystem is not None and as_arrow(storage_filesystem) is not None:
            raise TypeError("storage_filesystem is not supported: give path as an fsspec URL")
        try:
            handle = RunHandle[Any].attach(os.fspath(path), follows=False)
        except RunNotFoundError as missing:
            # Ray's type.
            raise RuntimeError(str(missing)) from missing
        value: Any = None
        error: Exception | None = None
        if handle.status().certain:
            try:
                value = handle.result()
            except RankZeroError as failure:
                error = with_failures(failure)
        return result_of(handle, value, error)

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Returns the kept checkpoint with the best value of a reported metric; None if there is no checkpoint.

        A value that is not a number is the worst.

        Args:
            metric: Name of the metric.
            mode: ``"max"`` or ``"min"``.

        Raises:
            RuntimeError: no checkpoint was reported with this metric.
            ValueError: ``mode`` is another one.
        """
        if mode not in MODES:
            raise ValueError(f'mode is {mode!r}; choose "min" or "max"')
        found = [(metrics, checkpoint) for checkpoint, metrics in self.best_checkpoints if metric in metrics]
        if self.best_checkpoints and not found:
            known = ", ".join(sorted({name for _, metrics in self.best_checkpoints for name in metrics}))
            raise RuntimeError(f"Invalid metric name {metric!r}: the reports with checkpoints have {known}")
        return max(found, key=lambda pair: score(pair[0], metric, mode))[1] if found else None


def result_of(handle: RunHandle[Any], value: Any, error: Exception | None = None) -> Result:
    """Returns the result of a run, with what it has reported so far."""
    run = RunDirectory(handle.directory)
    config = run.job().checkpoints
    kept = [(Checkpoint.of_run(Stored(handle.directory, one.id)), one.metrics) for one in handle.checkpoints()]
    newest = kept[-1][0] if kept else None
    if metric := config.get("metric"):
        kept.sort(key=lambda pair: score(pair[1], metric, config["mode"]))
    # The status has the last value of every metric, also of those that the last report left out.
    reports = _reports(handle)
    metrics = reports[-1]["metrics"] if reports else None
    return Result(metrics, newest, error, handle.directory, kept, value)


def with_failures(error: RankZeroError) -> RankZeroError:
    """Returns an error with Ray's ``worker_failures``: the failure by rank."""
    if isinstance(error, WorkerFailedError) and error.rank is not None:
        vars(error)["worker_failures"] = {error.rank: error}
    return error


def _reports(handle: RunHandle[Any]) -> list[dict[str, Any]]:
    """Returns the events of rank 0's reports."""
    return [event for event in handle.events() if event["type"] == "metric" and event["rank"] == 0]
