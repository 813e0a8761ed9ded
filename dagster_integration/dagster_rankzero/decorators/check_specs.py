"""Turns the values that rank 0 has reported into results of the checks in ``check_specs``."""

from typing import Any

import dagster as dg

from dagster_rankzero.arguments.partitions import take_single
from dagster_rankzero.metadata.describe import METRIC_PREFIX

CHECK_PREFIX = "check/"
"""Prefix of a check's name in `rankzero.train.report`."""


def with_reported_checks(context: dg.AssetExecutionContext, result: dg.MaterializeResult[Any], keys: list[str]) -> Any:
    """Returns the result with those of the selected checks of its asset: a ``finish`` for `build_compute`."""
    results = list(result.check_results or ())
    results += [
        check_result(key, result.metadata or {})
        for key in sorted(context.selected_asset_check_keys)
        if result.asset_key in (None, key.asset_key) and key.name not in {check.check_name for check in results}
    ]
    return take_single(context, result, keys)._replace(check_results=results)


def check_result(key: dg.AssetCheckKey, metadata: Any) -> dg.AssetCheckResult:
    """Returns the result of a check: passed if rank 0's latest value was True; failed if it has reported none."""
    name = CHECK_PREFIX + key.name
    entry = metadata.get(METRIC_PREFIX + name)
    if entry is None:
        description = f'rank 0 did not report it: call rankzero.train.report({{"{name}": True}}) or False'
        return dg.AssetCheckResult(passed=False, asset_key=key.asset_key, check_name=key.name, description=description)
    return dg.AssetCheckResult(passed=entry.value is True, asset_key=key.asset_key, check_name=key.name)
