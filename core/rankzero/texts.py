"""Text that every log, file and database accepts, whatever a user's exception or metric is called."""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""Returns the text with lone surrogates and NUL characters written out as escapes.

    `os.listdir` returns names with lone surrogates where a file's name is not UTF-8. No log that is UTF-8 or JSON can
    store them, and no PostgreSQL column can store a NUL.

    Example:
        >>> encodable("caf\udce9.csv")
        'caf\\udce9.csv'
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
