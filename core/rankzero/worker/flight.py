"""Dumps torch's flight recorder for a rank that hangs: a summary of its collectives, and all entries in a file.

The file is JSON: for its own pickle, torch first imports its compiler, for which a hanging rank gets no time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SHOWN = 20
"""Most uncompleted collectives in the summary; the last ones are shown."""

_NAMES = ("nccl", "fr")


def dump(directory: str | None, rank: int) -> list[str]:
    """Writes the recorder's entries to a file and summarizes them.

    Args:
        directory: Directory for the files of all ranks; None where this rank does not see the run directory.
        rank: The rank, which is part of the file's name.

    Returns:
        Lines for the rank's log; empty if torch has no recorder or it is switched off.
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
    """Returns lines with the state of each process group and the last uncompleted collectives.

    Args:
        found: The recorder's content, decoded from its JSON.
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
