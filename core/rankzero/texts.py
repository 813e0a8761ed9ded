"""Converts any text of a user, such as an exception's, to text that every log, file and database accepts."""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""Returns the text with lone surrogates and NUL characters written out as escapes.

    `os.listdir` returns lone surrogates for file names that are not UTF-8. A log in UTF-8 or JSON cannot store them,
    and a PostgreSQL column cannot store a NUL.

    Example:
        >>> encodable("caf\udce9.csv")
        'caf\\udce9.csv'
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
