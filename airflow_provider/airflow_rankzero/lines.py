"""Where a try begins to show what the ranks write: nothing is left out if it is little, else nothing comes twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.run.growing import Position
from rankzero.run.handle import RunHandle

REPLAY_BYTES = 256 << 10
"""Bytes of a rank's lines that are shown again rather than left out."""

REPLAY_PIECES = 30
"""The same for a run directory on an object store, in pieces of some seconds each."""


def begin(handle: RunHandle[Any], since: Mapping[int, Position]) -> dict[int, Position]:
    """Where to read on: from what was there when the training was submitted, or the end if much came since.

    Args:
        handle: The run.
        since: Where each rank's lines ended before; a rank that is not there began with nothing.
    """
    positions = {}
    for rank, end in handle.ends().items():
        start = since.get(rank, Position())
        near = end.piece - start.piece <= REPLAY_PIECES and end.offset - start.offset <= REPLAY_BYTES
        positions[rank] = start if near else end
    return positions


def to_json(positions: Mapping[int, Position]) -> dict[str, list[int]]:
    """For a trigger's arguments."""
    return {str(rank): [position.piece, position.offset] for rank, position in positions.items()}


def from_json(data: Mapping[str, list[int]]) -> dict[int, Position]:
    """From `to_json`."""
    return {int(rank): Position(*numbers) for rank, numbers in data.items()}
