"""Finds one schema for a table whose files have different ones. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankzero.data import kinds
from rankzero.data.manifest import ARROW, File
from rankzero.data.schemas import unify
from rankzero.errors import InvalidJobError

_ADVICE = "rewrite the table, or have Spark read it: dataset=a query or a DataFrame, which chooses columns and types"


def schema_of_files(first: Any, schemas: Sequence[Any], where: str) -> Any:
    """Returns the schema with the columns of all files, each of a type that can represent all files' values.

    Args:
        first: The schema of one file, with the partition columns from names of directories.
        schemas: The schemas of all files.
        where: The dataset's name for messages.

    Raises:
        InvalidJobError: a column has no such type.
    """
    import pyarrow as pa

    try:
        return unify([first, *schemas])
    except pa.ArrowException as error:
        raise InvalidJobError(f"the files of {where} have columns of different types ({error}): {_ADVICE}") from error


def with_nulls(files: Sequence[File], schemas: Sequence[Any], schema: Any, kind: str, where: str) -> tuple[File, ...]:
    """Returns the files with nulls as partition values for the columns that they lack.

    Args:
        files: The files of the table.
        schemas: The schema of each file.
        schema: The schema of the table.
        kind: The format of the files.
        where: The dataset's name for messages.

    Raises:
        InvalidJobError: a tensor cannot represent such nulls, or ranks cannot convert a file's type to the table's.
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
            # Ranks decode Parquet into the table's type, but map Arrow files without conversion.
            if found != field.type and kind == ARROW:
                raise pa.ArrowInvalid(f"it is {found}")
            pa.nulls(0, found).cast(field.type)
        except pa.ArrowException as error:
            raise InvalidJobError(
                f"column {field.name!r} of {where} is {field.type}, and in {file.location} {found}: {_ADVICE}"
            ) from error
    return replace(file, partition={**file.partition, **missing}) if missing else file
