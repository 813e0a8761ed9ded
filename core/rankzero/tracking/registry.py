"""Results as versions of a model in MLflow's registry, and the gate that a new champion has to pass."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rankzero import store
from rankzero.errors import InvalidJobError, ResultError
from rankzero.run.directory import RunDirectory
from rankzero.tracking.mlflow import DIRECTORY, EXPERIMENT, TRAINING, client_of, experiment_of, find_run
from rankzero.tracking.tracker import training_of
from rankzero.values.ref import ResultRef

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"

_FOLDER = "model"
_REF = "result.json"
_DIGEST = "rankzero.digest"
_METRIC = "metric."
_COPY_CHUNK = 8 << 20


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model.

    Attributes:
        name: Name of the model.
        version: Number of the version.
        is_champion: True if the alias refers to this version.
        beaten: Metric of the version that had the alias before; None if there was none, or it has no such metric.
    """

    name: str
    version: str
    is_champion: bool
    beaten: float | None = None


def register_model(
    ref: ResultRef,
    name: str,
    metrics: Mapping[str, float],
    *,
    metric: str,
    mode: Literal["min", "max"] = "max",
    alias: str = CHAMPION,
    uri: str | None = None,
) -> ModelVersion:
    """Registers a result as a version of a model in MLflow, and makes it the champion if it is better than that.

    The file of the result is copied to MLflow's artifacts, so it outlives the run directory; below the run that
    `MLflow` has made of the training, if there is one. The same result again, by a pipeline's retry, is no second
    version; the version then has the metrics of the last call. The comparison is not atomic: two that register at the
    same time may both find the old champion.

    Args:
        ref: The result.
        name: Name of the registered model, which is created if it does not exist.
        metrics: Measured metrics of the result, kept as tags ``metric.NAME``.
        metric: Name of the metric that decides.
        mode: ``"max"`` or ``"min"``: whether a higher or lower value is better.
        alias: Alias of the champion.
        uri: URI of the tracking server; None: ``$MLFLOW_TRACKING_URI``.

    Returns:
        The version, and whether it has the alias now. It gets it if no version has it, if that one has no such metric,
        or if this one is better; ``nan`` never is.

    Raises:
        InvalidJobError: ``metrics`` lacks the metric that decides.
        ResultError: the result does not exist.
        mlflow.exceptions.MlflowException: the server's.

    Example:
        >>> made = register_model(ref, "digits", {"accuracy": 0.97}, metric="accuracy")  # doctest: +SKIP
        >>> made.is_champion  # doctest: +SKIP
        True
    """
    if metric not in metrics:
        raise InvalidJobError(
            f"metric is {metric!r}, and metrics has {', '.join(metrics) or 'none'}: give what decides"
        )
    if mode not in ("min", "max"):
        raise InvalidJobError(f'mode is {mode!r}; use "min" or "max"')
    client = client_of(uri)
    tags = {f"{_METRIC}{key}": repr(float(value)) for key, value in metrics.items()}
    if version := _version_of(client, name, ref):
        for tag, value in tags.items():
            client.set_model_version_tag(name, version, tag, value)
    else:
        version = _make_version(client, name, ref, tags)
    champion = _champion(client, name, alias)
    if champion is not None and str(champion.version) == version:
        return ModelVersion(name, version, True)
    before = float(champion.tags.get(f"{_METRIC}{metric}", "nan")) if champion else math.nan
    wins = _is_better(float(metrics[metric]), before, mode)
    if wins:
        client.set_registered_model_alias(name, alias, version)
    return ModelVersion(name, version, wins, None if math.isnan(before) else before)


def load_model(name: str, alias: str = CHAMPION, *, uri: str | None = None) -> Any:
    """Returns the value of the version that has an alias, as `ResultRef.load` of the registered result does.

    Other values than plain ones and dicts of tensors are unpickled, which may run code of the user who registered them.

    Args:
        name: Name of the registered model.
        alias: Alias of the version.
        uri: URI of the tracking server; None: ``$MLFLOW_TRACKING_URI``.

    Raises:
        ResultError: the version was not made by `register_model`, or its file was changed.
        mlflow.exceptions.MlflowException: there is no such model or alias.

    Example:
        >>> weights = load_model("digits")  # doctest: +SKIP
    """
    client = client_of(uri)
    version = client.get_model_version_by_alias(name, alias)
    if _DIGEST not in version.tags:
        raise ResultError(f"version {version.version} of {name} was not made by register_model")
    with tempfile.TemporaryDirectory(prefix="rankzero-") as scratch:
        folder = client.download_artifacts(version.run_id, _folder(version.tags[_DIGEST]), scratch)
        with open(os.path.join(folder, _REF)) as file:
            ref = ResultRef.from_json(json.load(file))
        if ref.digest != version.tags[_DIGEST]:
            raise ResultError(f"version {version.version} of {name} is not the result that was registered")
        return ref.load_from(os.path.join(folder, _file(ref)))


def _champion(client: MlflowClient, name: str, alias: str) -> Any:
    """Returns the version that has an alias; None if there is none."""
    aliases = client.get_registered_model(name).aliases
    return client.get_model_version(name, aliases[alias]) if alias in aliases else None


def _is_better(value: float, before: float, mode: str) -> bool:
    if math.isnan(value) or math.isnan(before):
        return not math.isnan(value)
    return value > before if mode == "max" else value < before


def _version_of(client: MlflowClient, name: str, ref: ResultRef) -> str | None:
    """Returns the version as which a result is already registered."""
    quoted = name.replace("'", "")
    found = client.search_model_versions(f"name = '{quoted}' and tags.`{_DIGEST}` = '{ref.digest}'", max_results=1)
    return str(found[0].version) if found else None


def _make_version(client: MlflowClient, name: str, ref: ResultRef, tags: Mapping[str, str]) -> str:
    from mlflow.exceptions import MlflowException

    run = _run_of(client, ref)
    folder = _folder(ref.digest)
    _copy(client, run, folder, ref)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {_DIGEST: ref.digest, "rankzero.uri": ref.uri, "rankzero.format": ref.format, **tags}
    source = f"{client.get_run(run).info.artifact_uri}/{folder}"
    return str(client.create_model_version(name, source, run, tags).version)


def _run_of(client: MlflowClient, ref: ResultRef) -> str:
    """Returns the MLflow run of the training that made a result; a new run if that training was not tracked."""
    if training := _training_that_made(ref):
        experiments = [found.experiment_id for found in client.search_experiments()]
        if found := find_run(client, experiments, TRAINING, training):
            return found
    made = client.create_run(experiment_of(client, EXPERIMENT), tags={DIRECTORY: ref.uri.rsplit("/", 2)[0]})
    client.set_terminated(made.info.run_id)
    return str(made.info.run_id)


def _training_that_made(ref: ResultRef) -> str | None:
    """Returns the id of the training whose result this is; None if it is not the result of a run."""
    # RUN_DIRECTORY/result/value-ATTEMPT.FORMAT
    if found := re.fullmatch(r"(.+)/result/value-(\d+)\.\w+", ref.uri):
        run = RunDirectory(found[1])
        for submission in range(run.newest_claim(), -1, -1):
            job = run.job_of(submission)
            # It may have no job: another process is about to write it, or died before it did.
            if job and job.first_attempt <= int(found[2]):
                return training_of(run.directory, job.fresh_since)
    return None


def _copy(client: MlflowClient, run: str, folder: str, ref: ResultRef) -> None:
    with tempfile.TemporaryDirectory(prefix="rankzero-") as scratch:
        path = os.path.join(scratch, _file(ref))
        try:
            with store.open_read(ref.uri) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target, _COPY_CHUNK)
        except FileNotFoundError:
            raise ResultError(f"the result {ref.uri} does not exist; was its run directory deleted?") from None
        client.log_artifact(run, path, folder)
        path = os.path.join(scratch, _REF)
        with open(path, "w") as file:
            json.dump(ref.to_json(), file)
        client.log_artifact(run, path, folder)


def _folder(digest: str) -> str:
    return f"{_FOLDER}-{digest.rpartition(':')[2][:16]}"


def _file(ref: ResultRef) -> str:
    return f"value.{ref.format}"
