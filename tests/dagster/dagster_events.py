"""What the tests ask of a finished Dagster run."""

import dagster as dg

from rankzero import ResultRef


def metadata_of(result: dg.ExecuteInProcessResult, key: str) -> dict[str, object]:
    """Plain values of an asset's only materialization in a run."""
    (event,) = [event for event in result.get_asset_materialization_events() if event.asset_key == dg.AssetKey(key)]
    return {name: entry.value for name, entry in event.materialization.metadata.items()}


def failure_of(result: dg.ExecuteInProcessResult, step: str) -> tuple[str, dict[str, object]]:
    """Description and plain metadata of the one `dagster.Failure` of a step."""
    (event,) = [event for event in result.get_step_failure_events() if event.step_key == step]
    facts = event.step_failure_data.user_failure_data
    assert facts is not None, event.step_failure_data.error
    return facts.description, {name: entry.value for name, entry in facts.metadata.items()}


def retries_of(result: dg.ExecuteInProcessResult, step: str) -> int:
    """How often a step was tried again."""
    return sum(e.event_type_value == "STEP_RESTARTED" for e in result.all_events if e.step_key == step)


def value_of(result: dg.ExecuteInProcessResult, node: str, output: str = "result") -> object:
    """What a step's output stands for: its value, or that of the handle which it delivered instead."""
    given = result.output_for_node(node, output)
    return given.load() if isinstance(given, ResultRef) else given
