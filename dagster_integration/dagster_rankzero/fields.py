"""Fields by name: one that does not exist is refused, and the message names those that are spelt like it.

Dagster ignores what it does not know, and a misspelt ``master`` would train on another Spark.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg
from pydantic import BaseModel, model_validator

from dagster_rankzero._compat import variable_of

ADDED = frozenset({"env", "spark_conf"})
"""Fields whose entries the options of one training add to those of the resource."""

LIKENESS = 0.7
"""How alike two names are, of 1, to be shown as what was meant: at 0.6 "mastr" would be "store", too."""


class KnownFields(dg.Config):
    """A configuration that refuses fields it does not have.

    Raises:
        dagster.DagsterInvalidDefinitionError: a field does not exist; names it and what is spelt like it.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_fields(cls, given)
        return given


def check_fields(owner: type[BaseModel], given: Iterable[str]) -> None:
    """Raises DagsterInvalidDefinitionError if one of the names is not a field of the class."""
    if reason := why_unknown(owner, given):
        raise dg.DagsterInvalidDefinitionError(reason)


def why_unknown(owner: type[BaseModel], given: Iterable[str]) -> str | None:
    """Which of the names are not fields of the class, and what is meant; None if all are.

    Args:
        owner: A class with fields.
        given: Names that are to be its fields.

    Example:
        >>> class Cluster(dg.Config):
        ...     master: str
        >>> why_unknown(Cluster, ["mastr"])
        "Cluster has no field 'mastr' (did you mean 'master'?); its fields are master"
    """
    known = [field.alias or name for name, field in owner.model_fields.items()]
    unknown = [_with_matches(str(name), known) for name in given if name not in known]
    if not unknown:
        return None
    return f"{owner.__name__} has no field {', '.join(unknown)}; its fields are {', '.join(known)}"


def resolve_variables(value: Any) -> Any:
    """A value, or those of a dict, with each `dagster.EnvVar` replaced by what it stands for now.

    Dagster does it for a resource of the definitions; changes for one step come later.

    Raises:
        dagster.DagsterInvalidDefinitionError: a variable is not set.
    """
    if isinstance(value, dict):
        return {key: resolve_variables(item) for key, item in value.items()}
    name = variable_of(value)
    if name is None:
        return value
    found = value.get_value()
    if found is None:
        raise dg.DagsterInvalidDefinitionError(f"the environment variable {name} is not set where the step runs")
    return found


def added_to(base: Mapping[str, str], changes: Any) -> Any:
    """Returns a mapping with the entries of another one; None as a value removes one. Anything else as it is.

    Example:
        >>> added_to({"a": "1", "b": "2"}, {"b": None, "c": "3"})
        {'a': '1', 'c': '3'}
    """
    if not isinstance(changes, Mapping):
        return changes
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


def _with_matches(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=2, cutoff=LIKENESS)
    return f"{name!r} (did you mean {' or '.join(map(repr, matches))}?)" if matches else repr(name)
