"""Counts the nulls of a column at every depth, and refuses those that a tensor cannot hold.

`count_nulls` runs in Spark's workers, too, so it needs only pyarrow. An inner column has a path: ``a.x`` is a field of
the struct ``a``, ``a[]`` are the elements of the arrays ``a``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rankzero.data import kinds
from rankzero.errors import InvalidJobError

VECTOR = ["type", "size", "indices", "values"]
"""The fields of Spark ML's vectors, some of which are null by design."""


def count_nulls(path: str, column: Any) -> Iterator[tuple[str, int]]:
    """Yields the path and the number of nulls of an Arrow column and of each column inside of it."""
    from pyarrow import types

    yield path, column.null_count
    if types.is_struct(column.type) and [field.name for field in column.type] != VECTOR:
        for field, inner in zip(column.type, column.flatten(), strict=True):
            yield from count_nulls(f"{path}.{field.name}", inner)
    elif types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        yield from count_nulls(f"{path}[]", column.flatten())


def inner_kinds(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and the type of a column and of each column inside of it."""
    from pyarrow import types

    yield path, kind
    if types.is_struct(kind) and not kinds.is_vector(kind):
        for field in kind:
            yield from inner_kinds(f"{path}.{field.name}", field.type)
    elif kinds.is_list(kind):
        yield from inner_kinds(f"{path}[]", kind.value_type)


def check_nulls(schema: Any, counts: Iterable[Mapping[str, int]], where: str) -> None:
    """Refuses nulls that a tensor cannot hold.

    Args:
        schema: The schema of the columns.
        counts: Number of nulls of each part of the rows, by path.
        where: Name of the dataset, for errors.

    Raises:
        InvalidJobError: a column has nulls that a tensor cannot hold; the error names the first one.
    """
    total: dict[str, int] = {}
    for part in counts:
        for path, count in part.items():
            total[path] = total.get(path, 0) + count
    for field in schema:
        for path, kind in inner_kinds(field.name, field.type):
            if total.get(path) and not kinds.allows_null(kind):
                raise InvalidJobError(
                    f"column {path!r} of {where} ({kind}) has {total[path]} nulls, and a tensor cannot hold a null "
                    f"{kind}: fill or filter them, for example with DataFrame.fillna or dropna"
                )
