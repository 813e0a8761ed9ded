"""Asset checks of a training's metrics: those that rank 0 reports, bounds, and the comparison with the champion.

A check of an asset with partitions has one evaluation for each partition of a run. A blocking check stops the assets
*after* the checked one, which is stored even if the check fails: publish a model in a separate asset after the check.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import dagster as dg

from dagster_rankzero import _compat
from dagster_rankzero.inputs import keys_of
from dagster_rankzero.metadata import METRIC_PREFIX
from rankzero.pipeline import reports

Asset = dg.AssetKey | str | Sequence[str] | dg.AssetsDefinition | dg.AssetSpec
"""An asset, or its key."""


def build_metric_bounds_checks(
    asset: Asset,
    bounds: Mapping[str, tuple[float | None, float | None]],
    *,
    blocking: bool = True,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> list[dg.AssetChecksDefinition]:
    """Makes one check for each metric that its last value is within bounds.

    The checks read the asset's metadata, not its value. A metric that is missing or not a finite number fails. In a run
    of partitions each one's metric is checked, and the run of a range has an evaluation for each.

    Args:
        asset: The trained asset, or its key. By its key alone its partitions are unknown: the check then has one
            evaluation without a partition, and a run of a range is refused.
        bounds: Smallest and largest value by metric, both inclusive; None leaves a side open. Names
            are those of `rankzero.train.report`, or other numbers of the asset's metadata.
        blocking: Whether a failure stops the assets of the same run that depend on this one.
        severity: Severity of a failure in Dagster.

    Returns:
        The checks, named ``<metric>_within_bounds``.

    Raises:
        dagster.DagsterInvalidDefinitionError: bounds are no pair of numbers, empty, or the wrong way round.

    Example:
        >>> checks = build_metric_bounds_checks("model", {"accuracy": (0.9, None), "loss": (None, 0.5)})
        >>> [key.name for check in checks for key in check.check_keys]
        ['accuracy_within_bounds', 'loss_within_bounds']
    """
    for metric, pair in bounds.items():
        ends = [end for end in pair if end is not None] if isinstance(pair, (tuple, list)) and len(pair) == 2 else []
        if not ends or not all(isinstance(end, Real) and not math.isnan(end) for end in ends) or ends != sorted(ends):
            raise dg.DagsterInvalidDefinitionError(
                f"the bounds of {metric} are {pair!r}; give (smallest, largest), with None for an open side"
            )

    def bounds_check(metric: str, low: float, high: float) -> dg.AssetChecksDefinition:
        described = " and ".join([f"at least {low}"] * (low > -math.inf) + [f"at most {high}"] * (high < math.inf))

        def judge(context: dg.AssetCheckExecutionContext, partition: str | None) -> dg.AssetCheckResult:
            found = _measure(context, _key_of(asset), partition, metric)
            told = f"{metric} is {found:.6g}; it should be {described}"
            return dg.AssetCheckResult(passed=low <= found <= high, description=told, metadata={metric: found})

        name = _name_of(metric, "within_bounds")
        return _check(asset, name, f"{metric} is {described}.", judge, blocking, severity)

    return [
        bounds_check(metric, -math.inf if low is None else low, math.inf if high is None else high)
        for metric, (low, high) in bounds.items()
    ]


def build_champion_check(
    challenger: Asset,
    champion: Asset,
    metric: str,
    *,
    higher_is_better: bool = True,
    min_improvement: float = 0.0,
    blocking: bool = True,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetChecksDefinition:
    """Makes a check that a new model is at least as good as the one in production.

    The check compares a metric in the metadata of the latest materializations of two assets. The first
    challenger passes. Make the champion an asset after the check that returns the model unchanged: a
    `ResultRef` keeps the metrics of its training.

    The newest champion counts, whatever its partition. Where each partition has a champion of its own, write a
    ``@dg.asset_check``.

    Args:
        challenger: The trained asset, or its key, as for `build_metric_bounds_checks`.
        champion: The asset that publishes, or its key.
        metric: Name in `rankzero.train.report`, or of another number in the assets' metadata.
        higher_is_better: False for a loss.
        min_improvement: Least improvement over the champion; a negative number allows a worse challenger.
        blocking: As for `build_metric_bounds_checks`.
        severity: As for `build_metric_bounds_checks`.

    Returns:
        The check, named ``<metric>_beats_champion``.

    Example:
        >>> check = build_champion_check("model", "champion", "accuracy")
        >>> next(iter(check.check_keys)).name
        'accuracy_beats_champion'
    """

    def judge(context: dg.AssetCheckExecutionContext, partition: str | None) -> dg.AssetCheckResult:
        found = _measure(context, _key_of(challenger), partition, metric)
        if _latest(context, _key_of(champion), None) is None:
            return dg.AssetCheckResult(passed=True, description="the first champion", metadata={"challenger": found})
        reigning = _measure(context, _key_of(champion), None, metric)
        better = found - reigning if higher_is_better else reigning - found
        shown = {"challenger": found, "champion": reigning, "improvement": better}
        return dg.AssetCheckResult(passed=better >= min_improvement, metadata=shown)

    described = f"{metric} is at least as good as that of {_key_of(champion).to_user_string()}."
    return _check(challenger, _name_of(metric, "beats_champion"), described, judge, blocking, severity)


def evaluations(
    context: Any,
    spec: dg.AssetCheckSpec,
    partitions: Sequence[str | None],
    judge: Callable[[str | None], dg.AssetCheckResult],
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """Yields an evaluation of a check for each partition, and the output with which the check has been executed."""
    for partition in partitions:
        yield _compat.evaluation_of(context, judge(partition), spec, partition)
    yield dg.Output(None, _compat.output_of_check(context, spec.key))


def reported_checks(
    context: dg.AssetExecutionContext, specs: Sequence[dg.AssetCheckSpec], metadata: Mapping[str, Any]
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """Yields the evaluations of a step's selected checks: passed if rank 0's latest value was True, else failed."""
    keys = keys_of(context)
    for spec in specs:
        if spec.key not in context.selected_asset_check_keys:
            continue
        whole = reports.CHECK_PREFIX + spec.name

        def judge(partition: str | None, whole: str = whole) -> dg.AssetCheckResult:
            own = f"{whole}/{partition}" if partition else whole
            # A value without a partition would be that of the last partition that was trained.
            names = [own, whole] if len(keys) <= 1 else [own]
            found = next((metadata[METRIC_PREFIX + name] for name in names if METRIC_PREFIX + name in metadata), None)
            told = f'rank 0 did not report it: call rankzero.train.report({{"{names[-1]}": True}})'
            return dg.AssetCheckResult(passed=found is True, description=told if found is None else None)

        yield from evaluations(context, spec, keys if keys and spec.partitions_def else [None], judge)


def _check(
    asset: Asset,
    name: str,
    description: str,
    judge: Callable[[dg.AssetCheckExecutionContext, str | None], dg.AssetCheckResult],
    blocking: bool,
    severity: dg.AssetCheckSeverity,
) -> dg.AssetChecksDefinition:
    spec = dg.AssetCheckSpec(name, asset=_key_of(asset), description=description, blocking=blocking)
    spec = _compat.with_partitions(spec, _partitions_of(asset))

    @dg.multi_asset_check(name=spec.get_python_identifier(), specs=[spec])
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[Any]:
        def judged(partition: str | None) -> dg.AssetCheckResult:
            try:
                return judge(context, partition)._replace(severity=severity)
            except LookupError as error:
                return dg.AssetCheckResult(passed=False, severity=severity, description=str(error))

        yield from evaluations(context, spec, _run_partitions(context, spec), judged)

    return check


def _run_partitions(context: dg.AssetCheckExecutionContext, spec: dg.AssetCheckSpec) -> Sequence[str | None]:
    """Returns the partitions that a run's check judges: those of the run, or that of the newest materialization."""
    keys, newest = keys_of(context), _latest(context, spec.asset_key, None)
    if spec.partitions_def is None and (newest is None or newest.partition is None):
        # Partitions of the run are of other assets.
        return [None]
    if spec.partitions_def is None and len(keys) > 1:
        raise dg.Failure(
            f"the check {spec.name} has no partitions, and this run has several: build it with the asset instead "
            "of its key, or with dg.AssetSpec(key, partitions_def=...)",
            allow_retries=False,
        )
    return keys or [newest.partition if newest else None]


def _latest(context: Any, key: dg.AssetKey, partition: str | None) -> dg.AssetMaterialization | None:
    """Returns the latest materialization of an asset, or of one of its partitions; None if there is none."""
    wanted = dg.AssetRecordsFilter(key, asset_partitions=[partition] if partition else None)
    records = context.instance.fetch_materializations(wanted, limit=1).records
    return records[0].asset_materialization if records else None


def _measure(context: Any, key: dg.AssetKey, partition: str | None, metric: str) -> float:
    """Returns a metric in an asset's latest materialization, or in that of a partition; raises LookupError without."""
    latest, name = _latest(context, key, partition), key.to_user_string()
    if latest is None:
        raise LookupError(f"{name} has no materialization" + (f" of the partition {partition}" if partition else ""))
    entry: Any = latest.metadata.get(METRIC_PREFIX + metric) or latest.metadata.get(metric)
    if entry is not None and reports.is_number(entry.value):
        return float(entry.value)
    why = f"the latest materialization of {name} has no finite number {metric!r}: report it with "
    why += "rankzero.train.report, or give it as metadata"
    raise LookupError(why)


def _key_of(asset: Asset) -> dg.AssetKey:
    if isinstance(asset, (dg.AssetsDefinition, dg.AssetSpec)):
        return asset.key
    return dg.AssetKey.from_user_string(asset) if isinstance(asset, str) else dg.AssetKey.from_coercible(asset)


def _partitions_of(asset: Asset) -> dg.PartitionsDefinition[str] | None:
    return asset.partitions_def if isinstance(asset, (dg.AssetsDefinition, dg.AssetSpec)) else None


def _name_of(metric: str, suffix: str) -> str:
    # Dagster takes letters, digits and underscores.
    return f"{re.sub(r'[^A-Za-z0-9]', '_', metric)}_{suffix}"
