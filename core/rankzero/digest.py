"""A checksum of arguments, by which a training is told from one with others."""

from __future__ import annotations

import hashlib
from typing import Any

_DIGITS = 16


class _Hash:
    """A file that keeps a checksum of what is written, and nothing else: arguments may be large."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return memoryview(data).nbytes


def digest_of(*values: Any) -> str:
    """A short checksum, the same in every process for equal values.

    Args:
        values: Anything that can be pickled.

    Returns:
        Hexadecimal digits; empty for values that cannot be pickled: their submission says what is wrong with them.

    Example:
        >>> digest_of({"lr": 0.1}) == digest_of({"lr": 0.1})
        True
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> Any:
            # The order of a set of strings is another one in every process.
            if type(value) in (set, frozenset):
                return type(value).__name__, sorted(digest_of(item) for item in value)
            return None

    hashed = _Hash()
    try:
        Pickler(hashed).dump(values)
    except Exception:
        return ""
    return hashed.sha256.hexdigest()[:_DIGITS]
