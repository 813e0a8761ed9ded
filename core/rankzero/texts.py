"""Converts any text of a user, such as an exception's, to text that every log, file and database accepts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

LIKENESS = 0.7
"""Least similarity, at most 1, of a name that is suggested: at 0.6 "store" would be suggested for "mastr", too."""


def with_matches(name: str, known: Iterable[str]) -> str:
    """Returns a misspelt name for a message, with the most similar ones.

    Example:
        >>> with_matches("num_proceses", ["num_processes", "store"])
        "'num_proceses' (did you mean 'num_processes'?)"
    """
    matches = difflib.get_close_matches(name, list(known), n=2, cutoff=LIKENESS)
    return f"{name!r} (did you mean {' or '.join(map(repr, matches))}?)" if matches else repr(name)


def spelt(value: Any) -> Any:
    """Returns a number or flag as Spark spells it, and any other value unchanged.

    Example:
        >>> spelt(2), spelt(False), spelt("2g")
        ('2', 'false', '2g')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def encodable(text: str) -> str:
    r"""Returns the text with lone surrogates and NUL characters written out as escapes.

    `os.listdir` returns lone surrogates for file names that are not UTF-8. A log in UTF-8 or JSON cannot store them,
    and a PostgreSQL column cannot store a NUL.

    Example:
        >>> encodable("caf\udce9.csv")
        'caf\\udce9.csv'
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
