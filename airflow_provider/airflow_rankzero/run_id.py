"""The name of a task's run: people find the run directory of a try by it."""

from __future__ import annotations

import re
import secrets

STEM_LIMIT = 180
"""Characters before the random part; core allows 200 in all."""


def run_id_of(dag_id: str, dag_run_id: str, task_id: str, map_index: int, try_number: int) -> str:
    """A name for one try of one task instance.

    Args:
        dag_id: Id of the DAG.
        dag_run_id: Id of the DAG run.
        task_id: Id of the task.
        map_index: Index of a mapped task, -1 for any other.
        try_number: From 1.

    Returns:
        ``dag__run__task[__map]__tryN-`` and a random part: Airflow numbers tries anew when its
        database or the DAG run is deleted, but a run directory stays.

    Example:
        >>> run_id_of("digits", "manual__2026-01-01T00:00:00+00:00", "train", -1, 2)[:-8]
        'digits__manual__2026-01-01T00-00-00+00-00__train__try2-'
    """
    mapped = [str(map_index)] if map_index >= 0 else []
    stem = "__".join([dag_id, dag_run_id, task_id, *mapped])
    stem = re.sub(r"[^A-Za-z0-9._=+-]+", "-", stem).lstrip("._=+-") or "task"
    end = f"__try{try_number}"
    return f"{stem[: STEM_LIMIT - len(end)]}{end}-{secrets.token_hex(4)}"
