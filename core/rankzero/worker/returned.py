"""Finds temporary paths in the value that a training returned, which are deleted with the run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

MOST_EXAMINED = 1000
"""Items of a returned container that are examined."""

_AGENT_S = f"{os.sep}rankzero-agent-"
"""Part of each path below an agent's directories, one of which is a rank's ``TMPDIR``."""


def paths_that_go(value: Any) -> list[str]:
    """Returns the paths in a returned value that are deleted with the run, such as those of `tempfile`.

    Args:
        value: The value that the training function returned; containers are examined one level deep.
    """
    found = (os.fspath(item) for item in _items(value) if isinstance(item, (str, os.PathLike)))
    return [path for path in found if isinstance(path, str) and _AGENT_S in path and os.path.exists(path)]


def _items(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        return itertools.islice(value.values(), MOST_EXAMINED)
    if type(value) in (list, tuple):
        return itertools.islice(value, MOST_EXAMINED)
    return iter([value])
