"""The page of a run of a real Airflow: behind its login, with the runs of the configured store."""

import http.client
import json
import urllib.parse

import pytest
from tests.airflow.deployment import Deployment

from rankzero import Launcher


@pytest.fixture(scope="module")
def trained(airflow: Deployment) -> str:
    """A run of a DAG's, in the store of this Airflow."""

    def train() -> float:
        import rankzero.train as rt

        rt.report({"step": 1, "loss": 0.25})
        print("seen by those who may")
        return 0.5

    labels = {"dag_id": "shipped", "task_id": "train"}
    Launcher(1, store=airflow.store, run_id="of-a-dag", labels=labels, start_timeout=240).run(train)
    return "of-a-dag"


def get(airflow: Deployment, path: str, **headers: str) -> tuple[int, str]:
    """Without following redirects, as a browser with these headers."""
    address = urllib.parse.urlsplit(airflow.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_only_who_is_logged_in_sees_the_runs(airflow: Deployment, trained: str) -> None:
    path = f"/rankzero/runs/{trained}"
    code, text = get(airflow, path)
    assert (code, trained in text) == (401, False)
    code, text = get(airflow, path, Cookie="_token=nonsense")
    assert (code in (401, 403), trained in text) == (True, False)
    # As a browser does, which has a cookie after the login.
    code, text = get(airflow, path, Cookie=f"_token={airflow.token}")
    assert (code, trained in text) == (200, True)


def test_a_report_is_the_one_of_the_run(airflow: Deployment, trained: str) -> None:
    code, text = get(airflow, f"/rankzero/runs/{trained}", Authorization=f"Bearer {airflow.token}")
    facts = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert (code, facts["id"], facts["labels"]["dag_id"]) == (200, trained, "shipped")
    assert "seen by those who may" in facts["logs"][0]["lines"]
    for path in ("/rankzero/runs/no-such-run", "/rankzero/runs/..%2F..%2Fetc", "/rankzero/"):
        assert get(airflow, path, Authorization=f"Bearer {airflow.token}")[0] == 404, path
