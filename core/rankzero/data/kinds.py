"""Maps the types of Arrow columns to tensors, and refuses types and nulls without one. The module does not need torch.

The table of the types is in ``docs/data.md``. `count_nulls` runs in Spark's workers, too, so it needs only pyarrow. An
inner column has a path: ``a.x`` is a field of the struct ``a``, ``a[]`` are the elements of the arrays ``a``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rankzero.errors import InvalidJobError

VECTOR = ("type", "size", "indices", "values")
"""The fields of a vector of Spark ML."""


def check(schema: Any, where: str) -> None:
    """Refuses a `pyarrow.Schema` with columns that cannot become a tensor. ``where`` names the dataset in errors.

    Raises:
        InvalidJobError: a column cannot become a tensor; the error names the first one.
    """
    for column in schema:
        if why := _why_not(column.type):
            raise InvalidJobError(f"column {column.name!r} of {where} is {column.type}: {why}")


def _why_not(kind: Any) -> str | None:
    """Returns why a type cannot become a tensor; None if it can."""
    from pyarrow import types

    if types.is_struct(kind):
        reasons = (f"its field {field.name!r}: {why}" for field in kind if (why := _why_not(field.type)))
        return next(reasons, None)
    if is_list(kind):
        inner = kind.value_type
        if _is_number(inner) or types.is_fixed_size_list(inner):
            return _why_not(inner)
        return f"arrays of {inner} cannot become a tensor; leave the column out, or flatten it"
    if _is_number(kind) or is_text(kind):
        return None
    return "this type cannot become a tensor; leave the column out, or convert it to numbers"


def stored(kind: Any) -> Any:
    """Returns the type in which ranks read a column: what an extension type stores, no categories, no large texts."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return stored(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return stored(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(stored(field.type)) for field in kind])
    small = {"string_view": pa.string(), "binary_view": pa.binary(), "large_string": pa.string()}
    return {**small, "large_binary": pa.binary()}.get(str(kind), kind)


def is_list(kind: Any) -> bool:
    """Returns True for a type of arrays, of equal or different lengths."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Returns True for the types of strings and bytes."""
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
    )


def allows_null(kind: Any) -> bool:
    """Returns True if a column of this type can represent a null: as nan, or as None in a list."""
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_decimal(kind) or is_text(kind))


def is_vector(kind: Any) -> bool:
    """Returns True for the type of Spark ML's vectors."""
    from pyarrow import types

    return bool(types.is_struct(kind) and tuple(field.name for field in kind) == VECTOR)


def count_nulls(path: str, column: Any) -> Iterator[tuple[str, int]]:
    """Yields the path of an Arrow column, and of each column inside of it, with the number of its nulls.

    Columns that have no nulls, or can represent them, are left out.
    """
    from pyarrow import types

    if column.null_count and not allows_null(column.type):
        yield path, column.null_count
    # Some fields of a vector are null by design.
    if types.is_struct(column.type) and not is_vector(column.type):
        for field, inner in zip(column.type, column.flatten(), strict=True):
            yield from count_nulls(f"{path}.{field.name}", inner)
    elif is_list(column.type):
        yield from count_nulls(f"{path}[]", column.flatten())


def check_nulls(counts: Iterable[Mapping[str, int]], where: str) -> None:
    """Refuses nulls that a tensor cannot hold, whose numbers are given for each part of the rows, by path.

    Raises:
        InvalidJobError: there are such nulls; the error names the first column.
    """
    total = sum(map(Counter, counts), Counter[str]())
    for path, count in total.items():
        raise InvalidJobError(
            f"column {path!r} of {where} has {count} nulls, and a tensor cannot hold a null of its type: fill or "
            "filter them, for example with DataFrame.fillna or dropna"
        )
