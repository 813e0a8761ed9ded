"""A checksum of arguments, by which a training is told from one with others."""

from __future__ import annotations

import enum
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
    """A short checksum, the same in every process for equal plain values, and for objects of equal attributes.

    Args:
        values: Anything that can be pickled.

    Returns:
        Hexadecimal digits; empty for values that cannot be pickled: their submission says what is wrong with them.

    Example:
        >>> digest_of({"lr": 0.1}) == digest_of({"lr": 0.1})
        True
    """
    # Without a memo equal values are told alike whether they are one object or two; what refers to itself needs it.
    return _pickled(values, memo=False) or _pickled(values, memo=True)


def _pickled(values: object, *, memo: bool) -> str:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> Any:
            return _stable(value)

    hashed = _Hash()
    pickler = Pickler(hashed)
    pickler.fast = not memo
    try:
        pickler.dump(values)
    except Exception:
        return ""
    return hashed.sha256.hexdigest()[:_DIGITS]


def _stable(value: Any) -> Any:
    """Something else to take the checksum of, for a value that is pickled in another way in every process."""
    cls = type(value)
    if cls in (set, frozenset):
        return cls.__name__, sorted(digest_of(item) for item in value)
    if cls.__module__ in ("__main__", "__mp_main__") or "<locals>" in cls.__qualname__:
        # Its class travels by value, under a random name.
        state = value.value if isinstance(value, enum.Enum) else getattr(value, "__dict__", None)
        slots = [getattr(value, name, None) for name in getattr(cls, "__slots__", ())]
        return cls.__qualname__, digest_of(state, slots)
    return None
