"""Passes partition keys as arguments to a training function, and splits its value by partition."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from dagster_rankzero._compat import name_of

PARTITION_KEY = "partition_key"
PARTITION_KEYS = "partition_keys"


@dataclass(frozen=True)
class PartitionArguments:
    """The parameters ``partition_key`` and ``partition_keys`` of a training function.

    Attributes:
        name: Name of the function, for messages.
        taken: Those of the two parameters that the function has and that are not inputs.
        needed: Those of ``taken`` without a default.
    """

    name: str
    taken: frozenset[str]
    needed: frozenset[str]

    @staticmethod
    def of(train: Callable[..., Any], named_ins: frozenset[str]) -> "PartitionArguments":
        """Reads the signature of a function; parameters in ``named_ins`` are inputs, whatever their names."""
        found = {
            name: parameter
            for name, parameter in inspect.signature(train).parameters.items()
            if name in (PARTITION_KEY, PARTITION_KEYS) and name not in named_ins
        }
        needed = frozenset(name for name, parameter in found.items() if parameter.default is inspect.Parameter.empty)
        return PartitionArguments(train.__name__, frozenset(found), needed)

    def check(self, partitions_def: object, backfill_policy: dg.BackfillPolicy | None) -> None:
        """Raises DagsterInvalidDefinitionError if no run, or no backfill, could provide the needed parameters."""
        if self.needed and partitions_def is None:
            raise dg.DagsterInvalidDefinitionError(
                f"{self.name} has a parameter {min(self.needed)!r}, but the asset has no partitions: "
                "give partitions_def"
            )
        several = backfill_policy is not None and backfill_policy.max_partitions_per_run != 1
        if several and PARTITION_KEY in self.needed:
            raise dg.DagsterInvalidDefinitionError(
                f"{self.name} takes one {PARTITION_KEY!r}, but its backfills give several to one run: take "
                f"{PARTITION_KEYS!r} and return a dict with one value for each, or use BackfillPolicy.multi_run()"
            )

    def fill(self, context: Any) -> dict[str, Any]:
        """Returns the partition arguments for a run.

        Raises:
            dagster.Failure: the run has no partition, or several although the function takes one. Not retried.
        """
        keys = keys_of(context)
        if PARTITION_KEY in self.needed and len(keys) != 1:
            has = f"the partitions {', '.join(keys)}: launch them one by one" if keys else "no partition: launch one"
            raise dg.Failure(
                f"{self.name} has a parameter {PARTITION_KEY!r}, but this run has {has}", allow_retries=False
            )
        if PARTITION_KEYS in self.needed and not keys:
            raise dg.Failure(
                f"{self.name} has a parameter {PARTITION_KEYS!r}, but this run has no partition: launch one",
                allow_retries=False,
            )
        arguments: dict[str, Any] = {}
        if PARTITION_KEY in self.taken and len(keys) == 1:
            arguments[PARTITION_KEY] = keys[0]
        if PARTITION_KEYS in self.taken and keys:
            arguments[PARTITION_KEYS] = keys
        return arguments


def take_single(context: Any, result: Any, keys: list[str]) -> Any:
    """Returns the result of a step for its IO manager: a single partition's value is taken out of the dict by key.

    Args:
        context: Context of the step.
        result: Result of the run.
        keys: The ``partition_keys`` that the function got; empty if it does not take them.

    Raises:
        dagster.Failure: the value is a dict with other keys than the only partition's. Not retried.
    """
    value = of_single(result.value, keys, name_of(context))
    if value is result.value:
        return result
    if isinstance(result, dg.MaterializeResult):
        # The version belongs to the dict, not to the value.
        return result._replace(value=value, data_version=None)
    return dg.Output(value, metadata=result.metadata)


def of_single(value: Any, keys: list[str], name: str) -> Any:
    """Returns the value of the only partition from a dict by key; any other value unchanged, for the IO manager.

    Raises:
        dagster.Failure: the dict has other keys than the only partition's. Not retried.
    """
    if len(keys) == 1 and isinstance(value, Mapping):
        return by_partition(value, keys, name)[keys[0]]
    return value


def by_partition(value: Any, keys: list[str], name: str) -> dict[str, Any]:
    """Returns the value of every partition from the output of a run.

    Args:
        value: The output.
        keys: The run's partition keys.
        name: Name of the asset or output, for the message.

    Raises:
        dagster.Failure: the output is not a dict with the run's partition keys. Not retried.
    """
    got = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        values = {str(key): item for key, item in value.items()}
        if values.keys() == set(keys):
            return values
        got = f"a dict with the keys {sorted(values)}"
    raise dg.Failure(
        f"a run of the partitions {', '.join(sorted(keys))} of {name} got {got}: "
        "return a dict with one value for each partition key, or use BackfillPolicy.multi_run(); then re-execute the "
        "whole step: from the failure it would get the same value again",
        allow_retries=False,
    )


def keys_of(context: Any) -> list[str]:
    """Returns the partition keys of a context's run; empty if it has none."""
    if context.has_partition_key:
        return [str(context.partition_key)]
    return [str(key) for key in context.partition_keys] if context.has_partition_key_range else []
