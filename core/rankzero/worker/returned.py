"""What a training returns, before the run's temporary files are deleted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

MOST_LOOKED_AT = 1000
"""Items of a returned container that are examined."""

_AGENT_S = f"{os.sep}rankzero-agent-"
"""Part of each path below an agent's directories, to which a rank's ``TMPDIR`` belongs."""


def paths_that_go(value: Any) -> list[str]:
    """Returns the paths in a returned value that are deleted with the run: files that it made by `tempfile`.

    Args:
        value: What the training function returned; containers in it are examined one level deep.
    """
    found = (os.fspath(item) for item in _items(value) if isinstance(item, (str, os.PathLike)))
    return [path for path in found if isinstance(path, str) and _AGENT_S in path and os.path.exists(path)]


def _items(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        return itertools.islice(value.values(), MOST_LOOKED_AT)
    if type(value) in (list, tuple):
        return itertools.islice(value, MOST_LOOKED_AT)
    return iter([value])
