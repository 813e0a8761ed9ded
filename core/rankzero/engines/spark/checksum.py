"""Checksums of a DataFrame: one for each row, and one for all rows in any order."""

from __future__ import annotations

import hashlib
from typing import Any

from rankzero.data.kinds import VECTOR

_WORD = 1 << 64


def row_hash(frame: Any) -> Any:
    """Returns a column with a checksum of each row.

    Spark's own hash ignores the positions of nulls and the ends of arrays. So this one also hashes where nulls are, at
    every depth, and hashes each array by itself.
    """
    from pyspark.sql import functions as F

    return F.xxhash64(*(part for field in frame.schema for part in _parts(frame[f"`{field.name}`"], field.dataType)))


def digest_of(total: int, rows: int, frame: Any) -> str:
    """Returns the checksum of a DataFrame from the sum of its rows' checksums and their number."""
    facts = (total % _WORD, rows, frame.schema.simpleString())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def stored(kind: Any) -> Any:
    """Returns the type in which Spark stores a user-defined type; other types stay unchanged."""
    return kind.sqlType() if hasattr(kind, "sqlType") else kind


def _parts(column: Any, kind: Any) -> list[Any]:
    from pyspark.sql import functions as F
    from pyspark.sql import types

    parts = [F.isnull(column)]
    if isinstance(kind, types.StructType):
        # Spark cannot resolve a field by name if the name of another one differs in case only.
        kind = types.StructType([types.StructField(f"f{at}", field.dataType) for at, field in enumerate(kind)])
        column = column.cast(kind)
        fields = ((column.getField(field.name), field.dataType) for field in kind)
        return parts + [part for field in fields for part in _parts(*field)]
    if stored(kind) is not kind:
        # The first field of a vector is its kind. For other types, only Spark's JSON exposes the fields.
        is_vector = getattr(stored(kind), "names", None) == list(VECTOR)
        return [*parts, F.xxhash64(column if is_vector else F.to_json(F.struct(column)))]
    if not isinstance(kind, types.ArrayType):
        return [*parts, column]
    return [*parts, F.xxhash64(column), F.xxhash64(F.transform(column, F.isnull))]
