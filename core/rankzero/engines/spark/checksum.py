"""What a DataFrame's rows are: a checksum of each, and one of all of them in whatever order they come."""

from __future__ import annotations

import hashlib
from typing import Any

from rankzero.data.kinds import VECTOR

_WORD = 1 << 64


def row_hash(frame: Any) -> Any:
    """A column with a checksum of each row.

    Spark's hash knows the words that a value is made of, one after the other: neither where a null is nor where an
    array ends. So nulls are a part of it, at every depth, and each array is hashed by itself.
    """
    from pyspark.sql import functions as F

    return F.xxhash64(*(part for field in frame.schema for part in _parts(frame[f"`{field.name}`"], field.dataType)))


def digest_of(total: int, rows: int, frame: Any) -> str:
    """The checksum of a DataFrame from the sum of its rows' and their number."""
    facts = (total % _WORD, rows, frame.schema.simpleString())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def stored(kind: Any) -> Any:
    """Of a type of the user's own, what Spark keeps of it."""
    return kind.sqlType() if hasattr(kind, "sqlType") else kind


def _parts(column: Any, kind: Any) -> list[Any]:
    from pyspark.sql import functions as F
    from pyspark.sql import types

    parts = [F.isnull(column)]
    if isinstance(kind, types.StructType):
        # Spark finds no field by its name if another one differs from it in case only.
        kind = types.StructType([types.StructField(f"f{at}", field.dataType) for at, field in enumerate(kind)])
        column = column.cast(kind)
        fields = ((column.getField(field.name), field.dataType) for field in kind)
        return parts + [part for field in fields for part in _parts(*field)]
    if stored(kind) is not kind:
        # A vector begins with what it is; of others Spark opens the fields in its JSON alone.
        is_vector = getattr(stored(kind), "names", None) == list(VECTOR)
        return [*parts, F.xxhash64(column if is_vector else F.to_json(F.struct(column)))]
    if not isinstance(kind, types.ArrayType):
        return [*parts, column]
    return [*parts, F.xxhash64(column), F.xxhash64(F.transform(column, F.isnull))]
