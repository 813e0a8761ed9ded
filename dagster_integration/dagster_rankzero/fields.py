"""Configuration classes that refuse unknown fields, with a message that suggests fields of similar spelling.

Dagster ignores unknown fields, so that a misspelt ``master`` would train on another Spark cluster.
"""

from collections.abc import Iterable, Mapping
from typing import Any, get_origin

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dagster_rankzero._compat import variable_of
from rankzero.pipeline import step_options, with_matches

OPTIONS = step_options(
    orphan_timeout={
        "help": "Seconds for which a training continues after the process of its step has died, until the next try of "
        "the step attaches to it. None: the longest delay of the retry policy plus 15 minutes."
    }
)
"""The options of a run, by name, that are fields of the resource."""

ADDED = frozenset({"env", "spark_conf"})
"""Fields whose entries in the options of one training are added to those of the resource."""


def option_field(name: str) -> Any:
    """Returns the field of an option of a run, with its default, and its help for the UI."""
    option = OPTIONS[name]
    default = [] if option.default == () else {} if get_origin(option.kind.plain) is dict else option.default
    return Field(default=default, description=option.help.replace("None", "null").replace("``", "`"))


class KnownFields(dg.Config):
    """A configuration class that refuses unknown fields.

    Raises:
        dagster.DagsterInvalidDefinitionError: a field does not exist; the error suggests fields of similar spelling.
    """

    # Errors reach Dagster's event log, and a value may be a password or contain a token.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_fields(cls, given)
        return given

    @classmethod
    def configure_at_launch(cls, **fields: Any) -> Any:
        """Returns a resource or an IO manager whose other fields are set in the launchpad.

        Args:
            fields: The fields with known values.

        Raises:
            dagster.DagsterInvalidDefinitionError: a field does not exist.
        """
        check_fields(cls, fields)
        return super().configure_at_launch(**fields)  # type: ignore[misc]


def check_fields(owner: type[BaseModel], given: Iterable[str]) -> None:
    """Raises DagsterInvalidDefinitionError if one of the names is not a field of the class."""
    if reason := why_unknown(owner, given):
        raise dg.DagsterInvalidDefinitionError(reason)


def why_unknown(owner: type[BaseModel], given: Iterable[str]) -> str | None:
    """Returns a message about names that are not fields of a class, with suggestions; None if all are fields.

    Args:
        owner: A class with fields.
        given: Names of supposed fields.

    Example:
        >>> class Cluster(dg.Config):
        ...     master: str
        >>> why_unknown(Cluster, ["mastr"])
        "Cluster has no field 'mastr' (did you mean 'master'?); its fields are master"
    """
    known = [field.alias or name for name, field in owner.model_fields.items()]
    unknown = [with_matches(str(name), known) for name in given if name not in known]
    if not unknown:
        return None
    return f"{owner.__name__} has no field {', '.join(unknown)}; its fields are {', '.join(known)}"


def resolve_variables(value: Any) -> Any:
    """Returns a value, or the values of a dict, with each `dagster.EnvVar` replaced by its current value.

    Dagster itself replaces only those of a resource in the definitions, not those of changes for one step.

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
    """Returns a mapping with the entries of another one; None as a value removes an entry. Other values are returned.

    Example:
        >>> added_to({"a": "1", "b": "2"}, {"b": None, "c": "3"})
        {'a': '1', 'c': '3'}
    """
    if not isinstance(changes, Mapping):
        return changes
    return {name: value for name, value in {**base, **changes}.items() if value is not None}
