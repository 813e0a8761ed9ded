"""A DAG that knows nothing of rankzero and pulls a result of another one."""

from datetime import datetime

from airflow.sdk import dag, task


@dag(schedule=None, start_date=datetime(2026, 1, 1), params={"run_id": ""})
def pulling() -> None:
    @task
    def pull(**context):
        def load(task_id):
            found = context["ti"].xcom_pull(dag_id="shipped", task_ids=task_id, run_id=context["params"]["run_id"])
            return found.load()

        return f"{load('train')['total'].item()} {load('diverge')}"

    pull()


pulling()
