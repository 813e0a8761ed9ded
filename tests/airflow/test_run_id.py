"""Names of runs: readable, the same for every try, another for every task instance, and always allowed by core."""

from rankzero.kinds import RUN_ID


def test_names_are_readable_and_tell_each_task_instance() -> None:
    # Each process of the suite imports this module, and few of them need Airflow.
    from airflow_rankzero.tries import run_id_of

    first = run_id_of("d", "manual__2026-01-01T00:00:00+00:00", "group.t", 4)
    assert first.startswith("d__manual__2026-01-01T00-00-00+00-00__group.t__4-")
    names = [("d", "r:1", "t", -1), ("d", "r-1", "t", -1), ("d__r", "1", "t", -1), ("d", "r__1", "t", -1)]
    names += [("d" * 250, "r" * 250, "t" * 250, index) for index in range(3)] + [
        ("_d", "r", "t", 0),
        ("日本", "r", "t", -1),
    ]
    run_ids = {run_id_of(*name) for name in names}
    assert len(run_ids) == len(names)
    for run_id in run_ids:
        RUN_ID.check("run_id", run_id)
