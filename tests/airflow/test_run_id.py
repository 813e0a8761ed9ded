"""Names of runs: readable, the same for every try, another for every task instance, and always allowed by core."""

import pytest

from rankzero.kinds import RUN_ID


def run_id_of(dag_id: str, dag_run_id: str, task_id: str, map_index: int) -> str:
    # Each process of the suite imports this module, and few of them need Airflow.
    from airflow_rankzero import tries

    return tries.run_id_of(dag_id, dag_run_id, task_id, map_index)


@pytest.mark.parametrize(
    ("dag_id", "dag_run_id", "task_id", "map_index", "start"),
    [
        ("d", "manual__2026-01-01T00:00:00+00:00", "t", -1, "d__manual__2026-01-01T00-00-00+00-00__t-"),
        ("d", "r", "group.t", 4, "d__r__group.t__4-"),
        ("_d", "r", "t", 0, "d__r__t__0-"),
        ("日本", "r", "t", -1, "r__t-"),
    ],
)
def test_run_id_tells_the_task(dag_id: str, dag_run_id: str, task_id: str, map_index: int, start: str) -> None:
    run_id = run_id_of(dag_id, dag_run_id, task_id, map_index)
    RUN_ID.check("run_id", run_id)
    assert run_id.startswith(start)
    assert run_id == run_id_of(dag_id, dag_run_id, task_id, map_index)


def test_names_that_look_alike_or_are_cut_are_told_apart() -> None:
    names = [("d", "r:1", "t", -1), ("d", "r-1", "t", -1), ("d__r", "1", "t", -1), ("d", "r__1", "t", -1)]
    names += [("d" * 250, "r" * 250, "t" * 250, index) for index in range(3)]
    run_ids = {run_id_of(*name) for name in names}
    assert len(run_ids) == len(names)
    for run_id in run_ids:
        RUN_ID.check("run_id", run_id)
