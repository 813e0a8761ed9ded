"""Asset checks of a training's metrics: bounds, and a comparison with the model in production.

A blocking check stops the assets *after* the checked one, which is stored even if the check fails. Publish a
model in a separate asset after the check.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import dagster as dg

from dagster_rankzero import _compat
from dagster_rankzero.metadata import METRIC_PREFIX, table
from rankzero.pipeline import is_number, reports

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

    The checks read the asset's metadata, not its value. A metric that is missing or not a finite
    number fails. In a run of a partition, that partition's metric is checked; that of the newest materialization if
    the asset has no such partition. In a run of a range of partitions, the metric of each must be within the bounds.

    Args:
        asset: The trained asset, or its key.
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
    names = [_name_of(metric, "within_bounds") for metric in bounds]
    if twins := sorted(metric for metric, name in zip(bounds, names, strict=True) if names.count(name) > 1):
        raise dg.DagsterInvalidDefinitionError(
            f"the metrics {' and '.join(twins)} would give checks of one name: Dagster takes letters, digits and _ only"
        )
    return [_bounds_check(_key_of(asset), metric, pair, blocking, severity) for metric, pair in bounds.items()]


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

    A champion with partitions other than times, such as regions, has a model for each: the challenger is compared with
    that of its own partition, or of the dimensions that both have, such as the region of a day and region. With
    partitions of time, or without any, it is compared with the newest champion. In a run of a range of partitions, each
    challenger must be at least as good as its champion.

    Args:
        challenger: The trained asset, or its key.
        champion: The asset that publishes. By its key alone its partitions are unknown, and the newest one counts.
        metric: Name in `rankzero.train.report`, or of another number in the assets' metadata.
        higher_is_better: False for a loss.
        min_improvement: Least improvement over the champion; a negative number allows a worse challenger.
        blocking: Whether a failure stops the assets of the same run that depend on the challenger.
        severity: Severity of a failure in Dagster.

    Returns:
        The check, named ``<metric>_beats_champion``.

    Example:
        >>> check = build_champion_check("model", "champion", "accuracy")
        >>> next(iter(check.check_keys)).name
        'accuracy_beats_champion'
    """
    challenger_key, champion_key = _key_of(challenger), _key_of(champion)
    partitions = champion.partitions_def if isinstance(champion, (dg.AssetsDefinition, dg.AssetSpec)) else None

    def comparable(context: dg.AssetCheckExecutionContext, partition: str | None) -> list[str] | None:
        trained = _compat.partitions_of(context, challenger_key)
        return _comparable(context, partition, trained, champion_key, partitions)

    def judge(context: dg.AssetCheckExecutionContext, partition: str | None) -> dg.AssetCheckResult:
        latest = _latest(context, challenger_key, _judged(context, challenger_key, partition))
        found = _metric_of(latest, metric)
        if found is None:
            return _unknown(latest, metric, challenger_key, severity)
        latest = _latest(context, champion_key, comparable(context, partition))
        if latest is None:
            return dg.AssetCheckResult(passed=True, description="the first champion", metadata={"challenger": found})
        reigning = _metric_of(latest, metric)
        if reigning is None:
            return _unknown(latest, metric, champion_key, severity)
        improvement = found - reigning if higher_is_better else reigning - found
        return dg.AssetCheckResult(
            passed=improvement >= min_improvement,
            severity=severity,
            metadata={"challenger": found, "champion": reigning, "improvement": improvement},
        )

    described = f"{metric} is at least as good as that of {champion_key.to_user_string()}."
    return _check(challenger_key, _name_of(metric, "beats_champion"), described, blocking, severity, judge, comparable)


def _bounds_check(
    key: dg.AssetKey,
    metric: str,
    bounds: tuple[float | None, float | None],
    blocking: bool,
    severity: dg.AssetCheckSeverity,
) -> dg.AssetChecksDefinition:
    low = -math.inf if bounds[0] is None else bounds[0]
    high = math.inf if bounds[1] is None else bounds[1]
    described = " and ".join([f"at least {low}"] * (low > -math.inf) + [f"at most {high}"] * (high < math.inf))

    def judge(context: dg.AssetCheckExecutionContext, partition: str | None) -> dg.AssetCheckResult:
        latest = _latest(context, key, _judged(context, key, partition))
        found = _metric_of(latest, metric)
        if found is None:
            return _unknown(latest, metric, key, severity)
        return dg.AssetCheckResult(
            passed=low <= found <= high,
            severity=severity,
            description=f"{metric} is {found:.6g}; it should be {described}",
            metadata={metric: found},
        )

    return _check(key, _name_of(metric, "within_bounds"), f"{metric} is {described}.", blocking, severity, judge)


def _check(
    key: dg.AssetKey,
    name: str,
    description: str,
    blocking: bool,
    severity: dg.AssetCheckSeverity,
    judge: Callable[[dg.AssetCheckExecutionContext, str | None], dg.AssetCheckResult],
    comparable: Callable[[dg.AssetCheckExecutionContext, str | None], object] = lambda context, partition: None,
) -> dg.AssetChecksDefinition:
    """Makes a check that judges the run's partitions of an asset, or else those that another asset has in common."""

    @dg.asset_check(asset=key, name=name, description=description, blocking=blocking)
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        run = _partitions_of(context, key)
        own = [part for part in run if _judged(context, key, part)]
        judged = own or [part for part in run if comparable(context, part) is not None] or run[:1]
        return _judge_all(judged, lambda partition: judge(context, partition), severity)

    return check


def _partitions_of(context: dg.AssetCheckExecutionContext, key: dg.AssetKey) -> Sequence[str | None]:
    """Returns the partitions of a run that checks an asset; only None if the run has none."""
    if context.has_partition_key:
        return [context.partition_key]
    if not context.has_partition_key_range:
        return [None]
    try:
        return list(context.partition_keys) or [None]
    except dg.DagsterInvariantViolationError:
        # A job of checks alone has no partitions that would tell which keys are in the range.
        if (partitions := _compat.partitions_of(context, key)) is None:
            return [None]
        with dg.partition_loading_context(dynamic_partitions_store=context.instance):
            return list(partitions.get_partition_keys_in_range(context.partition_key_range)) or [None]


def _judge_all(
    partitions: Sequence[str | None],
    judge: Callable[[str | None], dg.AssetCheckResult],
    severity: dg.AssetCheckSeverity,
) -> dg.AssetCheckResult:
    """Returns the result of a check that passes if each partition does; that of the partition itself if it is one."""
    if len(partitions) == 1:
        return judge(partitions[0])
    results = {str(partition): judge(partition) for partition in partitions}
    failed = [partition for partition, result in results.items() if not result.passed]
    rows = [
        {
            "partition": partition,
            "passed": result.passed,
            **{name: shown.value for name, shown in (result.metadata or {}).items()},
            **({"description": result.description} if result.description else {}),
        }
        for partition, result in results.items()
    ]
    return dg.AssetCheckResult(
        passed=not failed,
        severity=severity,
        description=f"{len(failed)} of {len(results)} partitions fail: {', '.join(failed)}" if failed else None,
        metadata={"partitions": table(rows)},
    )


def _judged(context: dg.AssetCheckExecutionContext, key: dg.AssetKey, partition: str | None) -> list[str] | None:
    """Returns a run's partition of a checked asset; None for the newest materialization, whatever its partition."""
    if partition is None:
        return None
    partitions = _compat.partitions_of(context, key)
    if partitions is None:
        # Only the materializations show whether an asset of another code location has partitions.
        newest = _latest(context, key, None)
        return None if newest is None or newest.partition is None else [partition]
    return [partition] if _is_of(context, partitions, partition) else None


def _is_of(context: dg.AssetCheckExecutionContext, partitions: dg.PartitionsDefinition[str], partition: str) -> bool:
    """Returns True if a key is one of an asset's partitions: those of the run may be of other assets."""
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return partition.count("|") == len(partitions.partitions_defs) - 1
    if isinstance(partitions, dg.DynamicPartitionsDefinition):
        return partitions.name is not None and context.instance.has_dynamic_partition(partitions.name, partition)
    return partitions.has_partition_key(partition)


def _comparable(
    context: dg.AssetCheckExecutionContext,
    partition: str | None,
    challengers: dg.PartitionsDefinition[str] | None,
    champion: dg.AssetKey,
    champions: dg.PartitionsDefinition[str] | None,
) -> list[str] | None:
    """Returns the partitions of the champion that the challenger of a partition is compared with; None for all."""
    if partition is None or champions is None:
        return None
    own: dict[str, str] = {}
    keys, trained, published = _keys_of(partition), _dimensions_of(challengers), _dimensions_of(champions)
    for name, partitions in published.items():
        if isinstance(partitions, dg.TimeWindowPartitionsDefinition):
            continue
        found = {name: keys[name]} if name and name in keys else {}
        if not found:
            # Dimensions of other names, or without one, correspond if their partitions are equal, else by the key.
            others = {other: key for other, key in keys.items() if not other or other not in published}
            having = {other: key for other, key in others.items() if _is_of(context, partitions, key)}
            found = {other: key for other, key in having.items() if trained.get(other) == partitions} or having
        if len(found) == 1:
            own[name] = found.popitem()[1]
    if not own or not isinstance(champions, dg.MultiPartitionsDefinition):
        return list(own.values()) or None
    stored = context.instance.get_materialized_partitions(champion)
    return [key for key in stored if own.items() <= _keys_of(champions.get_partition_key_from_str(key)).items()]


def _dimensions_of(partitions: dg.PartitionsDefinition[str] | None) -> dict[str, dg.PartitionsDefinition[str]]:
    """Returns an asset's dimensions by name; a single one has an empty name."""
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return {dimension.name: dimension.partitions_def for dimension in partitions.partitions_defs}
    return {} if partitions is None else {"": partitions}


def _keys_of(partition: str) -> dict[str, str]:
    """Returns the keys of a partition by the dimension's name; a single dimension has an empty name."""
    return dict(partition.keys_by_dimension) if isinstance(partition, dg.MultiPartitionKey) else {"": partition}


def _latest(
    context: dg.AssetCheckExecutionContext, key: dg.AssetKey, partitions: list[str] | None
) -> dg.AssetMaterialization | None:
    """Returns the latest materialization of an asset, or of some of its partitions; None if there is none."""
    if partitions == []:
        return None
    records = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(key, asset_partitions=partitions), limit=1
    ).records
    return records[0].asset_materialization if records else None


def _metric_of(materialization: dg.AssetMaterialization | None, metric: str) -> float | None:
    """Returns a metric in the metadata; None if it is missing or not a finite number."""
    if materialization is None:
        return None
    entry: Any = materialization.metadata.get(METRIC_PREFIX + metric) or materialization.metadata.get(metric)
    value: Any = None if entry is None else entry.value
    return float(value) if is_number(value) else None


def _unknown(
    latest: dg.AssetMaterialization | None, metric: str, key: dg.AssetKey, severity: dg.AssetCheckSeverity
) -> dg.AssetCheckResult:
    if latest is None:
        why = f"{key.to_user_string()} has no materialization, or none of the run's partition"
    else:
        why = f"the latest materialization of {key.to_user_string()} has no finite number {metric!r}: report it with "
        why += "rankzero.train.report, or give it as metadata"
        if sum(name.startswith(METRIC_PREFIX) for name in latest.metadata) >= reports.MOST_METRICS:
            why += f"; a run keeps the first {reports.MOST_METRICS} names of metrics: report fewer"
    return dg.AssetCheckResult(passed=False, severity=severity, description=why)


def _key_of(asset: Asset) -> dg.AssetKey:
    if isinstance(asset, (dg.AssetsDefinition, dg.AssetSpec)):
        return asset.key
    return dg.AssetKey.from_user_string(asset) if isinstance(asset, str) else dg.AssetKey.from_coercible(asset)


def _name_of(metric: str, suffix: str) -> str:
    # Dagster takes letters, digits and underscores.
    return f"{''.join(c if c.isascii() and c.isalnum() else '_' for c in metric)}_{suffix}"
