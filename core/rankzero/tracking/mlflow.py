"""`MLflow`: each training is a run of MLflow, which continues when the training is resumed."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.errors import require
from rankzero.tracking.tracker import Rows, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from rankzero.run.handle import RunHandle
    from rankzero.run.status import RunStatus

EXPERIMENT = "rankzero"

MAX_PARAMS, MAX_METRICS = 100, 1000
"""Most items of a kind that one request to MLflow may hold."""

MAX_NAME = 230
"""Characters of a name; the server takes 250."""

MAX_TEXT = 4000
"""Characters of a tag; the server takes 5,000 or more."""

TRAINING = "rankzero.training"
"""Tag that identifies the MLflow run of a training that is resumed."""

DIRECTORY = "rankzero.directory"

_STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_NO_NAME = re.compile(r"[^\w .:/-]")


@dataclass(eq=False)
class MLflow(Tracker):
    """Makes each training a run of MLflow: its arguments as params, reports of ranks as metrics, and its state.

    A training that is restarted, retried or resumed continues in the same run of MLflow. Tags tell the run's id,
    directory, attempt, world size, identity and code version, and its labels.

    Attributes:
        uri: URI of the tracking server. None: ``$MLFLOW_TRACKING_URI`` where the run is driven, which also has what
            MLflow needs to log in: ``$MLFLOW_TRACKING_TOKEN`` and the like.
        experiment: Name of the experiment, which is created if it does not exist.
        ranks: Ranks whose reports are logged; None for all. Metrics of ranks other than 0 are named ``loss/rank-3``.
        tags: Additional tags of the run.

    Example:
        >>> from rankzero import Launcher
        >>> launcher = Launcher(2, trackers=[MLflow("http://mlflow:5000", experiment="digits")])  # doctest: +SKIP
    """

    uri: str | None = None
    experiment: str = EXPERIMENT
    ranks: Collection[int] | None = (0,)
    tags: Mapping[str, str] = field(default_factory=dict)

    is_idempotent = True

    def check(self) -> None:
        """Raises InvalidJobError if MLflow is not installed."""
        require("trackers has MLflow, which needs", "mlflow-skinny", "mlflow")

    def begin(self, run: RunHandle[Any]) -> None:
        """Finds the run of this training in MLflow, or creates it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self.uri)
        experiment = _experiment_of(client, self.experiment)
        training = training_of(run)
        found = client.search_runs([experiment], f"tags.`{TRAINING}` = '{training}'", max_results=1)
        self._id = found[0].info.run_id if found else None
        if self._id is None:
            tags = {TRAINING: training, DIRECTORY: run.directory, **_tags_of(run), **self.tags}
            made = client.create_run(experiment, int(run.job.created * 1000), _cut(tags), run_name=run.id)
            self._id = made.info.run_id
        else:
            client.update_run(self._id, status="RUNNING")
        # MLflow refuses another value of a param, such as a default that has changed since an earlier try.
        params = _named(run.params) | client.get_run(self._id).data.params
        for some in _batches([Param(name, value) for name, value in params.items()], MAX_PARAMS):
            client.log_batch(self._id, params=some)
        self._rows, self._names = Rows(self.ranks), _Names()

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Logs the reports of ranks, many in one request."""
        from mlflow.entities import Metric

        # Events that could not be sent are delivered again, and count once.
        rows = copy.deepcopy(self._rows)
        metrics = [
            Metric(self._names.of(name, row.rank), value, int(row.time * 1000), row.step)
            for row in rows.of(events)
            for name, value in row.metrics.items()
        ]
        for some in _batches(metrics, MAX_METRICS):
            self._client.log_batch(self._id, metrics=some)
        self._rows = rows
        for event in events:
            if event["type"] == "state" and event["state"] == "running":
                self._tag({"rankzero.attempt": event["attempt"], "rankzero.world_size": run.world_size})

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Ends the run of MLflow, unless the training will continue."""
        if status.final:
            if status.error:
                self._tag({"rankzero.error": status.error.get("message", "")})
            ended = None if status.ended is None else int(status.ended * 1000)
            self._client.set_terminated(self._id, _STATES[status.state], ended)

    def _tag(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in _cut(tags).items()])


def _experiment_of(client: MlflowClient, name: str) -> str:
    """Returns the id of an experiment, which is created if it does not exist."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            # Another run has created it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def training_of(run: RunHandle[Any]) -> str:
    """Returns an id of a training, which no other training has, whatever the path of its directory."""
    return hashlib.sha256(run.training.encode()).hexdigest()[:24]


def _tags_of(run: RunHandle[Any]) -> dict[str, Any]:
    own = {"run_id": run.id, "identity": run.job.identity, "code_version": run.job.code_version}
    known = {f"rankzero.{name}": value for name, value in own.items() if value}
    return {**known, **run.job.labels}


def _cut(tags: Mapping[str, Any]) -> dict[str, str]:
    return {name: value[:MAX_TEXT] for name, value in _named(tags).items()}


def _named(values: Mapping[str, Any]) -> dict[str, str]:
    names = _Names()
    return {names.of(name): str(value) for name, value in values.items()}


class _Names:
    """The names under which MLflow gets values; of several that become the same one, all but the first get digits."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, int]] = {}

    def of(self, name: str, rank: int = 0) -> str:
        """Returns MLflow's name of a value of a rank, which is the same in each call."""
        parts = [part for part in _NO_NAME.sub("_", name).split("/") if part.strip(".")]
        clean = ("/".join(parts)[:MAX_NAME].strip("/") or "_") + (f"/rank-{rank}" if rank else "")
        if self._owners.setdefault(clean, (name, rank)) == (name, rank):
            return clean
        return f"{clean}-{hashlib.sha256(f'{rank}/{name}'.encode()).hexdigest()[:8]}"


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
