"""Types of the inputs of a training function: a value, or the `ResultRef` that the ranks open."""

import typing
from typing import Any

import dagster as dg

import rankzero
from dagster_rankzero._compat import dagster_type_of


class OpenedByRanks(dg.DagsterType):
    """Type of an input that is passed to ranks: a value of the annotated type, or its handle.

    IO managers that choose by ``typing_type`` see the annotation of the training function.
    """

    def __init__(self, inner: dg.DagsterType) -> None:
        def check(context: dg.TypeCheckContext, value: object) -> dg.TypeCheck:
            return dg.TypeCheck(success=True) if is_reference(value) else inner.type_check(context, value)

        self._shown = inner.display_name
        # The type has a key instead of a name: two inputs with one annotation have two types, and names must be unique.
        super().__init__(
            type_check_fn=check,
            key=f"{type(self).__name__}.{inner.key}",
            description=inner.description,
            typing_type=inner.typing_type,
            loader=inner.loader,
        )

    @property
    def display_name(self) -> str:
        """Returns the annotation as the UI shows it."""
        return self._shown


def type_of_input(annotation: Any) -> dg.DagsterType:
    """Returns the type for an annotation of the training function."""
    return OpenedByRanks(dagster_type_of(annotation))


def is_reference(value: object) -> bool:
    """Returns True for a handle, and for the dict of handles of several partitions."""
    if isinstance(value, dict) and value:
        return all(isinstance(item, rankzero.ResultRef) for item in value.values())
    return isinstance(value, rankzero.ResultRef)


def wants_reference(dagster_type: dg.DagsterType) -> bool:
    """Returns True if an IO manager may give this input a handle instead of the value.

    Inputs of a training function accept a handle, and inputs that are annotated ``ResultRef``, ``ResultRef | None`` or
    ``dict[str, ResultRef]``.
    """
    annotation = dagster_type.typing_type
    wanted = (annotation, *typing.get_args(annotation))
    return isinstance(dagster_type, OpenedByRanks) or rankzero.ResultRef in wanted
