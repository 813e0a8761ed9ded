"""What torch's flight recorder knows of the collectives of a rank that hangs: a summary, and all of it in a file.

As JSON: to write its own pickle torch first imports its compiler, for which a rank that is to be ended has no time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SHOWN = 20
"""Collectives that did not end and that are shown, the last ones."""

_NAMES = ("nccl", "fr")


def dump(directory: str | None, rank: int) -> list[str]:
    """Writes the recorder's content, and describes it. It is empty where torch was not told to record, or has none.

    Args:
        directory: Of the files of all ranks; None where this rank does not see it.
        rank: Part of the file's name.

    Returns:
        Lines for the rank's log.
    """
    c10d = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    dist: Any = sys.modules.get("torch.distributed")
    if c10d is None or dist is None or not dist.is_initialized():
        return []
    for name in _NAMES:
        as_json = getattr(c10d, f"_dump_{name}_trace_json", None)
        data = as_json() if as_json else b"{}"
        found = json.loads(data)
        if found.get("entries"):
            lines = describe(found)
            if directory:
                path = _write(directory, rank, data.encode() if isinstance(data, str) else data)
                lines.append(f"rankzero: flight recorder: all of it is in {path}")
            return lines
    return []


def describe(found: dict[str, Any]) -> list[str]:
    """The state of each process group, then the last collectives that did not end.

    Args:
        found: The recorder's content, as its JSON has it.
    """
    lines = [
        f"rankzero: flight recorder: process group {group}: enqueued up to #{status.get('last_enqueued_collective')}, "
        f"started up to #{status.get('last_started_collective')}, completed up to "
        f"#{status.get('last_completed_collective')}"
        for group, status in found.get("pg_status", {}).items()
    ]
    waiting = [entry for entry in found["entries"] if not entry.get("retired")]
    lines += [
        f"rankzero: flight recorder: not completed: {entry.get('profiling_name')} "
        f"#{entry.get('collective_seq_id')} of {' '.join(map(str, entry.get('process_group', ())))}, "
        f"{entry.get('state')}, sizes {entry.get('input_sizes')}"
        for entry in waiting[-SHOWN:]
    ]
    return lines


def _write(directory: str, rank: int, data: bytes) -> str:
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"rank-{rank}.json")
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)
    return path
