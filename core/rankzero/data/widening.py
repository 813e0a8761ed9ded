"""Tests whether a type of a column holds every value of another type exactly, and widens Spark's types to Arrow's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MANTISSA = {16: 11, 32: 24, 64: 53}
"""By the bits of a float, the most bits of an integer that it holds exactly."""

_DIGITS = {7: 3, 8: 3, 15: 5, 16: 5, 31: 10, 32: 10, 63: 19, 64: 20}
"""By the bits of an integer without its sign, its most decimal digits."""

SPARK_DIGITS = 38
"""Digits of the largest decimal that Spark has."""


def holds(wide: Any, narrow: Any) -> bool:
    """Returns True if an Arrow type holds every value of a narrower type exactly.

    Args:
        wide: The common type that pyarrow chose for several types, one of which is ``narrow``.
        narrow: The narrower type.
    """
    from pyarrow import types

    if wide == narrow or types.is_null(narrow):
        return True
    if types.is_struct(wide):
        return all(holds(wide.field(field.name).type, field.type) for field in narrow)
    if types.is_map(wide):
        return holds(wide.key_type, narrow.key_type) and holds(wide.item_type, narrow.item_type)
    if hasattr(wide, "value_type") and hasattr(narrow, "value_type"):
        return holds(wide.value_type, narrow.value_type)
    if types.is_integer(wide):
        is_signed = types.is_signed_integer(wide)
        return _bits(narrow) <= _bits(wide) and (is_signed or types.is_unsigned_integer(narrow))
    if types.is_floating(wide):
        if types.is_integer(narrow):
            return _bits(narrow) <= _MANTISSA[wide.bit_width]
        return types.is_floating(narrow) and bool(narrow.bit_width <= wide.bit_width)
    if types.is_decimal(wide):
        return _decimal_holds(wide, narrow)
    # pyarrow widens all other types (text, bytes, dictionaries) exactly.
    return True


def _bits(integer: Any) -> int:
    """Returns the bits of an integer type without its sign."""
    from pyarrow import types

    return int(integer.bit_width) - int(types.is_signed_integer(integer))


def _decimal_holds(wide: Any, narrow: Any) -> bool:
    from pyarrow import types

    whole = wide.precision - wide.scale
    if types.is_integer(narrow):
        return bool(wide.precision <= SPARK_DIGITS and whole >= _DIGITS[_bits(narrow)])
    if not types.is_decimal(narrow):
        return False
    if wide.precision > max(SPARK_DIGITS, narrow.precision):
        return False
    return bool(wide.scale >= narrow.scale and whole >= narrow.precision - narrow.scale)


def structs(kind: Any) -> Iterator[Any]:
    """Yields the outermost struct types inside an Arrow type."""
    from pyarrow import types

    if types.is_struct(kind):
        yield kind
    elif types.is_map(kind):
        yield from structs(kind.key_type)
        yield from structs(kind.item_type)
    elif hasattr(kind, "value_type"):
        yield from structs(kind.value_type)


def widened(frame: DataFrame, schema: Any) -> DataFrame:
    """Returns a Spark DataFrame with its numbers in the types of an Arrow schema.

    Spark's own union is not exact: the common type of `int` and `float` is `float` there.

    Args:
        frame: A DataFrame with some of the columns of the schema, and of the fields of its structs.
        schema: The wanted types.
    """
    from pyspark.sql import functions as F

    wanted = {field.name: _spark_type(schema.field(field.name).type, field.dataType) for field in frame.schema.fields}
    casts = {
        field.name: F.col(f"`{field.name}`").cast(wanted[field.name])
        for field in frame.schema.fields
        if wanted[field.name] != field.dataType
    }
    return frame.withColumns(casts) if casts else frame


def _spark_type(kind: Any, found: Any) -> Any:
    """Returns a Spark type whose numbers have the types of an Arrow type."""
    from pyarrow import types
    from pyspark.sql import types as T

    if isinstance(found, T.StructType):
        fields = [
            T.StructField(each.name, _spark_type(kind.field(each.name).type, each.dataType), each.nullable)
            for each in found.fields
        ]
        return T.StructType(fields)
    if isinstance(found, T.ArrayType):
        return T.ArrayType(_spark_type(kind.value_type, found.elementType), found.containsNull)
    if isinstance(found, T.MapType):
        key, value = _spark_type(kind.key_type, found.keyType), _spark_type(kind.item_type, found.valueType)
        return T.MapType(key, value, found.valueContainsNull)
    if types.is_decimal(kind):
        return T.DecimalType(kind.precision, kind.scale)
    numbers = {
        "int8": T.ByteType,
        "int16": T.ShortType,
        "int32": T.IntegerType,
        "int64": T.LongType,
        "uint8": T.ShortType,
        "uint16": T.IntegerType,
        "uint32": T.LongType,
        "float": T.FloatType,
        "double": T.DoubleType,
        "binary": T.BinaryType,
    }
    return numbers[str(kind)]() if str(kind) in numbers else found
