"""Partitions: what ranks are told of them, how values go from one to another, backfills in one run and in many."""

from pathlib import Path

import dagster as dg
from tests.dagster.dagster_events import failure_of, value_of

from dagster_rankzero import torch_asset
from rankzero import ResultRef

LETTERS = dg.StaticPartitionsDefinition(["a", "b", "c"])
GRID = dg.MultiPartitionsDefinition(
    {"size": dg.StaticPartitionsDefinition(["s", "l"]), "day": dg.StaticPartitionsDefinition(["mon", "tue"])}
)
DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-04")


def tags(first: str, last: str) -> dict[str, str]:
    """What a backfill in a single run gives to its run."""
    return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}


def materialized(instance: dg.DagsterInstance, key: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey(key)))


def test_a_backfill_in_a_single_run_trains_once_and_stores_every_partition_apart(
    resources: dict[str, object], instance: dg.DagsterInstance, assets_path: Path
) -> None:
    @torch_asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
    def model(partition_keys: list[str]) -> dict[str, str]:
        return {key: f"model of {key}, trained with {len(partition_keys)}" for key in partition_keys}

    # A handle of the whole could not be taken apart.
    by_reference = {**resources, "torch_distributor": resources["torch_distributor"].options(by_reference=True)}
    dg.materialize([model], resources=by_reference, instance=instance, tags=tags("a", "b"))
    dg.materialize([model], resources=by_reference, instance=instance, partition_key="c")
    assert materialized(instance, "model") == {"a", "b", "c"}
    defs = dg.Definitions([model], resources=resources)
    stored = [defs.load_asset_value("model", partition_key=key, instance=instance) for key in "abc"]
    assert stored == ["model of a, trained with 2", "model of b, trained with 2", "model of c, trained with 1"]


def test_a_value_that_is_not_one_for_each_partition_is_refused(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @torch_asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
    def model(partition_keys: list[str]) -> dict[str, int]:
        return {"a": 1}

    for backfill, run in ({"tags": tags("a", "b")}, "a, b"), ({"partition_key": "b"}, "b"):
        result = dg.materialize([model], resources=resources, instance=instance, raise_on_error=False, **backfill)
        description, _ = failure_of(result, "model")
        assert f"the partitions {run} of model got a dict with the keys ['a']" in description
        assert "multi_run" in description
    assert materialized(instance, "model") == set()


def test_a_function_of_one_partition_cannot_be_backfilled_in_a_single_run(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @torch_asset(partitions_def=LETTERS, backfill_policy=dg.BackfillPolicy.single_run())
    def model(partition_key: str) -> str:
        return partition_key

    result = dg.materialize([model], resources=resources, instance=instance, tags=tags("a", "c"), raise_on_error=False)
    assert "a, b, c: launch them one by one" in failure_of(result, "model")[0]


def test_a_row_of_a_grid_arrives_as_a_dict_of_handles(
    resources: dict[str, object], instance: dg.DagsterInstance, assets_path: Path
) -> None:
    @torch_asset(partitions_def=GRID)
    def model(partition_key: str) -> str:
        import sys

        return partition_key if type(partition_key) is str and "dagster" not in sys.modules else "not a plain text"

    @torch_asset(partitions_def=GRID.get_partitions_def_for_dimension("day"))
    def best(model: dict[str, ResultRef], partition_key: str) -> list[str]:
        return [partition_key, *sorted(f"{key}={value}" for key, value in model.items())]

    for size in ("s", "l"):
        key = dg.MultiPartitionKey({"size": size, "day": "tue"})
        dg.materialize([model], resources=resources, instance=instance, partition_key=key)
    result = dg.materialize(
        [model, best], selection=[best], resources=resources, instance=instance, partition_key="tue"
    )
    assert value_of(result, "best") == ["tue", "tue|l=tue|l", "tue|s=tue|s"]


def test_a_week_is_trained_from_its_days_although_one_is_missing(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @dg.asset(partitions_def=DAYS)
    def day(context: dg.AssetExecutionContext) -> int:
        return int(context.partition_key[-2:])

    @torch_asset(
        partitions_def=dg.WeeklyPartitionsDefinition(start_date="2026-01-04"),
        ins={"day": dg.AssetIn(metadata={"allow_missing_partitions": True})},
    )
    def week(day: dict[str, int]) -> dict[str, int]:
        return day

    for key in ("2026-01-05", "2026-01-07"):
        dg.materialize([day], resources=resources, instance=instance, partition_key=key)
    result = dg.materialize(
        [day, week], selection=[week], resources=resources, instance=instance, partition_key="2026-01-04"
    )
    assert value_of(result, "week") == {"2026-01-05": 5, "2026-01-07": 7}
