"""Everything that is taken from Dagster's inside. One place to look at when Dagster changes."""

from typing import Any

import dagster as dg
from dagster._core.errors import DagsterInvalidPropertyError
from dagster._core.types.dagster_type import resolve_dagster_type
from dagster_shared.libraries import DagsterLibraryRegistry


def register_library(name: str, version: str) -> None:
    """Makes the package show up in Dagster's list of libraries."""
    # Without the flag Dagster warns that our version is not one of its own.
    DagsterLibraryRegistry.register(name, version, is_dagster_package=False)


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
