"""Names of runs: readable, unique, and always allowed by core."""

import pytest

from airflow_rankzero.run_id import run_id_of
from rankzero.job import check_run_id


@pytest.mark.parametrize(
    ("dag_id", "dag_run_id", "task_id", "map_index", "start"),
    [
        ("d", "manual__2026-01-01T00:00:00+00:00", "t", -1, "d__manual__2026-01-01T00-00-00+00-00__t__try3-"),
        ("d", "r", "group.t", 4, "d__r__group.t__4__try3-"),
        ("_d", "r", "t", 0, "d__r__t__0__try3-"),
        ("日本", "r", "t", -1, "r__t__try3-"),
    ],
)
def test_run_id_tells_the_try(dag_id: str, dag_run_id: str, task_id: str, map_index: int, start: str) -> None:
    run_id = run_id_of(dag_id, dag_run_id, task_id, map_index, 3)
    check_run_id(run_id)
    assert run_id.startswith(start)
    assert run_id != run_id_of(dag_id, dag_run_id, task_id, map_index, 3)


def test_long_names_are_cut_but_the_try_stays() -> None:
    run_id = run_id_of("d" * 250, "r" * 250, "t" * 250, 12, 7)
    check_run_id(run_id)
    assert "__try7-" in run_id
