"""The one schema of a table whose files were written at different times. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankzero.data import kinds
from rankzero.data.manifest import ARROW, File
from rankzero.data.schemas import unify
from rankzero.errors import InvalidJobError

_ADVICE = "write the table anew, or have Spark read it: dataset=a query or a DataFrame, which chooses columns and types"


def schema_of_files(first: Any, schemas: Sequence[Any], where: str) -> Any:
    """The schema with the columns of all files, each of the type that holds what they have.

    Args:
        first: The schema of one file, with the columns that stand in names of directories.
        schemas: Of all files.
        where: What they are, for people.

    Raises:
        InvalidJobError: there is no such type.
    """
    import pyarrow as pa

    try:
        return unify([first, *schemas])
    except pa.ArrowException as error:
        raise InvalidJobError(f"the files of {where} have columns of different types ({error}): {_ADVICE}") from error


def with_nulls(files: Sequence[File], schemas: Sequence[Any], schema: Any, kind: str, where: str) -> tuple[File, ...]:
    """The files, with nulls for the columns that they lack.

    Args:
        files: As they are.
        schemas: What is in each.
        schema: Of the table.
        kind: Their format.
        where: What they are, for people.

    Raises:
        InvalidJobError: a tensor has no place for such nulls, or the ranks cannot make the table's type of a file's.
    """
    return tuple(_with_nulls(file, inside, schema, kind, where) for file, inside in zip(files, schemas, strict=True))


def _with_nulls(file: File, inside: Any, schema: Any, kind: str, where: str) -> File:
    import pyarrow as pa

    missing: dict[str, str | None] = {}
    for field in schema:
        if field.name in file.partition:
            continue
        if field.name not in inside.names:
            if not kinds.allows_null(field.type):
                raise InvalidJobError(
                    f"column {field.name!r} of {where} ({field.type}) is not in {file.location}, and a tensor has no "
                    f"place for nulls of this type: {_ADVICE}"
                )
            missing[field.name] = None
            continue
        found = inside.field(field.name).type
        try:
            # Ranks decode Parquet into the table's type; Arrow files they map as they are.
            if found != field.type and kind == ARROW:
                raise pa.ArrowInvalid(f"it is {found}")
            pa.nulls(0, found).cast(field.type)
        except pa.ArrowException as error:
            raise InvalidJobError(
                f"column {field.name!r} of {where} is {field.type}, and in {file.location} {found}: {_ADVICE}"
            ) from error
    return replace(file, partition={**file.partition, **missing}) if missing else file
