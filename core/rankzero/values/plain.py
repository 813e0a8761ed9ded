"""Which values JSON gives back exactly as they were. Standard library only."""

from __future__ import annotations

MAX_DEPTH = 200
"""Levels of containers within each other: JSON's reader and writer recurse."""

MAX_BITS = 2048
"""Of an integer. Python turns no more than 4,300 digits into text and back, or as few as 640 where somebody set it."""

_REPEATS = 1000
"""Containers that may be there twice, whatever else there is."""


def is_json(value: object) -> bool:
    """True if JSON gives the value back exactly: same types, string keys, no tuples.

    Containers that hold themselves, or others many times over, are none.

    Example:
        >>> is_json({"a": [1, None]}), is_json({"a": (1,)})
        (True, False)
    """
    level, seen, visited = [value], set(), 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if type(item) is list:
                below += item
            elif type(item) is dict:
                if not all(type(key) is str for key in item):
                    return False
                below += item.values()
            elif not _is_atom(item):
                return False
            else:
                continue
            visited += 1
            seen.add(id(item))
        if not below:
            return True
        if visited > 2 * len(seen) + _REPEATS:
            return False
        level = below
    return False


def _is_atom(item: object) -> bool:
    if type(item) is int:
        return item.bit_length() <= MAX_BITS
    return item is None or type(item) in (bool, float, str)
