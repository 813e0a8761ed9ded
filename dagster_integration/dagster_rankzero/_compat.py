"""Everything that is taken from Dagster's inside. One place to look at when Dagster changes."""

from typing import Any

import dagster as dg
from dagster._core.errors import DagsterInvalidPropertyError
from dagster._core.types.dagster_type import resolve_dagster_type
from dagster.components.core.context import ComponentDeclLoadContext


def partition_paths(manager: dg.UPathIOManager, context: dg.OutputContext) -> dict[str, Any]:
    """Where each partition of an output goes, by its key."""
    return manager._get_paths_for_partitions(context)


def set_data_version(context: dg.OutputContext, version: str) -> None:
    """Gives the asset being stored a data version, unless its step gave one; nothing for an op's output."""
    step = context._step_context
    if step is not None and context.has_asset_key:
        step.set_data_version(context.asset_key, dg.DataVersion(version))


def set_step_data_version(context: dg.AssetExecutionContext, key: dg.AssetKey, version: dg.DataVersion) -> None:
    """Gives an asset of a step a data version, which its IO manager may replace."""
    context.set_data_version(key, version)


def component_folder(context: dg.ResolutionContext) -> str:
    """The Python package of the folder whose component is being loaded."""
    load_context = ComponentDeclLoadContext.from_resolution_context(context)
    path = load_context.path
    return load_context.defs_relative_module_name(path.parent if path.is_file() else path)


def dagster_type_of(annotation: Any) -> dg.DagsterType:
    """The Dagster type that an annotation of an input means."""
    return resolve_dagster_type(annotation)


def names_of(context: Any) -> tuple[str, str]:
    """The run id and the step's name of an asset's or op's context."""
    op_context = getattr(context, "op_execution_context", context)
    try:
        return op_context.run_id, op_context.op_def.name
    except DagsterInvalidPropertyError:
        # A context that a test made, outside of any step.
        return op_context.run_id, "direct"
