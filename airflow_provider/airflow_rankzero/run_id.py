"""The name of a task's run: every try of a task instance finds the same run directory by it."""

from __future__ import annotations

import hashlib
import re

STEM_LIMIT = 180
"""Characters before the checksum; core allows 200 in all."""


def run_id_of(dag_id: str, dag_run_id: str, task_id: str, map_index: int) -> str:
    """A name for the run of one task instance, the same in all its tries.

    Args:
        dag_id: Id of the DAG.
        dag_run_id: Id of the DAG run.
        task_id: Id of the task.
        map_index: Index of a mapped task, -1 for any other.

    Returns:
        ``dag__run__task[__map]-`` and a checksum of the four, since what cannot stand in the name of a directory is
        replaced there, and long names are cut.

    Example:
        >>> run_id_of("digits", "manual__2026-01-01T00:00:00+00:00", "train", -1)
        'digits__manual__2026-01-01T00-00-00+00-00__train-e2a272a94de9b56a'
    """
    parts = [dag_id, dag_run_id, task_id, *([str(map_index)] if map_index >= 0 else [])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "__".join(parts)).lstrip("._=+-") or "task"
    return f"{stem[:STEM_LIMIT]}-{digest[:16]}"
