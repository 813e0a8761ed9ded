"""The arguments of a task as its ranks get them, and what of them can be judged when a DAG file is parsed."""

from __future__ import annotations

from typing import Any

from rankzero import job


def plain(value: Any) -> Any:
    """``value`` with the lazy sequences of mapped tasks, also inside lists, tuples and dicts, as lists.

    The ranks cannot ask Airflow for their items.
    """
    from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence

    if type(value) is list or isinstance(value, LazyXComSequence):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


def check_early(num_processes: Any, processes_per_task: Any, backend: Any) -> None:
    """Refuses obvious mistakes when a DAG file is parsed; what is not known yet (mapped, templated) is let through.

    Raises:
        InvalidJobError: says which value, and what to do.
    """
    each = 1 if processes_per_task is None else processes_per_task
    if isinstance(num_processes, int) and isinstance(each, int):
        job.check_counts(num_processes, each)
    if backend is None or isinstance(backend, str):
        # With GPUs, which nobody knows yet, every backend may be right.
        job.check_choices(True, backend)
