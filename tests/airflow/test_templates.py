"""Numbers and scripts as templates, and what is refused before a task runs."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.versions import RunDag

WORLD = "import os\nimport rankzero.train as rt\nrt.set_result(int(os.environ['WORLD_SIZE']))\n"


def world_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def test_numbers_and_scripts_may_be_templates_and_values_of_other_tasks(
    dag: Any, run_dag: RunDag, tmp_path: Path
) -> None:
    from airflow.sdk import task

    from airflow_rankzero import TorchDistributorOperator, torch_distributor

    (tmp_path / "train.py").write_text(WORLD)
    store = tmp_path / "store"

    @task
    def count() -> int:
        return 2

    @torch_distributor(num_processes="{{ params.ranks }}", conn_id="here", store=str(store))
    def decorated() -> int:
        return world_size()

    decorated()
    TorchDistributorOperator(
        task_id="script",
        train="{{ params.folder }}/train.py",
        num_processes=count(),
        processes_per_task="{{ params.ranks }}",
        timeout="{{ params.lr * 1000 }}",
        start_timeout="{{ 480 }}",
        hang_timeout="{{ none }}",
        max_restarts="{{ params.ranks - 1 }}",
        conn_id="here",
        store=str(store),
    )
    words = ["test", "{{ params.ranks }}", "=", "2"]
    TorchDistributorOperator(task_id="command", train=words, num_processes=1, conn_id="here", store=str(store))
    dag.params["folder"] = str(tmp_path)
    outcome = run_dag(dag)
    assert outcome.xcom("decorated") == 2, outcome.errors
    assert outcome.xcom("script") == 2, outcome.errors
    assert outcome.task_state("command") == "success", outcome.errors
    (job,) = (json.loads(path.read_text()) for path in store.glob("*__script-*/submissions/0.json"))
    names = ("num_processes", "processes_per_task", "timeout", "start_timeout", "hang_timeout", "max_restarts")
    assert [job[name] for name in names] == [2, 2, 250.0, 480, None, 1]


def flaky() -> list[int]:
    import rankzero.train as rt

    context = rt.get_context()
    if context.attempt == 0:
        raise OSError(116, "Stale file handle")
    return [context.attempt, context.world_size]


def test_an_elastic_world_and_restart_on_may_be_templates(dag: Any, run_dag: RunDag, tmp_path: Path) -> None:
    from airflow_rankzero import TorchDistributorOperator

    common: dict[str, Any] = {"train": flaky, "conn_id": "here", "store": str(tmp_path / "store"), "max_restarts": 1}
    text = ["{{ 'Stale' }} file handle"]
    TorchDistributorOperator(task_id="texts", num_processes="1:{{ params.ranks }}", restart_on=text, **common)
    TorchDistributorOperator(task_id="classes", num_processes=(1, 2), restart_on=(KeyError, OSError), **common)
    TorchDistributorOperator(task_id="asked", num_processes=1, restart_on=lambda error: error.errno == 116, **common)
    outcome = run_dag(dag)
    assert [outcome.xcom(name) for name in ("texts", "classes", "asked")] == [[1, 2], [1, 2], [1, 1]], outcome.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_processes": "{{ params.lr }}"}, "num_processes is '0.25'; it must be a whole number"),
        ({"num_processes": "{{ '2:many' }}"}, "num_processes is 'many'; it must be a whole number"),
        ({"num_processes": "{{ '8:2' }}"}, "num_processes is (8, 2); an elastic world has"),
        ({"num_processes": "{{ 0 }}"}, "num_processes is 0; it must be a positive integer"),
        ({"timeout": "{{ 'soon' }}"}, "timeout is 'soon'; it must be a number of seconds"),
        ({"start_timeout": "{{ none }}"}, "start_timeout is 'None'"),
        ({"max_restarts": "{{ -1 }}"}, "max_restarts is -1"),
        ({"store": "{{ task.task_id }}"}, "store is 'train', a relative path"),
        ({"train": "no/such/script.py"}, f"looked at {Path(__file__).parent}/no/such/script.py"),
        ({"train": "posixpath:join", "op_args": ["/"], "op_kwargs": {"banana": 1}}, "banana"),
        ({"op_args": "{{ '--epochs 3' }}"}, "op_args is '--epochs 3'"),
        ({"spark_conf": {"spark.jars": ["a.jar"]}}, "conf['spark.jars']"),
        ({"spark_conf": {"spark.dynamicAllocation.enabled": True}}, "spark.dynamicAllocation.enabled"),
        ({"env": {"TOKEN": None}}, "env['TOKEN']"),
        # A mapped task is created from its values in each try.
        ({"mapped": {"num_processes": [0]}}, "num_processes is 0"),
    ],
)
def test_what_cannot_be_run_fails_for_good_before_anything_starts(
    dag: Any, run_dag: RunDag, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    from airflow_rankzero import TorchDistributorOperator
    from airflow_rankzero._compat import AirflowFailException
    from rankzero import InvalidJobError

    # Without AirflowFailException the task would be up for retry.
    given = {"task_id": "train", "train": int, "store": str(tmp_path), "retries": 3, **arguments}
    if mapped := given.pop("mapped", None):
        TorchDistributorOperator.partial(**given).expand(**mapped)
    else:
        TorchDistributorOperator(**given)
    outcome = run_dag(dag)
    (error,) = outcome.errors.values()
    assert isinstance(error, AirflowFailException)
    assert isinstance(error.__cause__, InvalidJobError)
    assert words in str(error)
    assert outcome.state == "failed"
    assert list(tmp_path.iterdir()) == []


def trained(lr: float) -> None:
    """A training."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_processes": 0}, "num_processes is 0"),
        ({"num_processes": "many"}, "num_processes is 'many'; it must be a whole number"),
        ({"train": 7}, "train is 7; give a function"),
        ({"op_args": "--lr 0.1"}, "op_args is '--lr 0.1'; it must be a list of arguments"),
        ({"op_kwargs": [1]}, "op_kwargs is [1]; it must map names to arguments"),
        ({"train": trained, "op_kwargs": {"rate": 1}}, "the arguments do not fit trained(lr: float) -> None"),
        ({"train": trained, "op_args": ["{{ params.lr }}", 2]}, "the arguments do not fit trained(lr: float) -> None"),
        ({"conn_id": "cluster", "master": "yarn"}, "conn_id is 'cluster', and master is given"),
        *(
            ({name: f"{{{{ params.{name} }}}}"}, f"{name} is '{{{{ params.{name} }}}}', but cannot be a template")
            for name in ("backend", "log_ranks", "skip_on_exit_code", "retry_user_errors", "deferrable")
        ),
    ],
)
def test_obvious_mistakes_are_refused_when_the_file_is_parsed(dag: Any, arguments: dict[str, Any], words: str) -> None:
    from airflow_rankzero import TorchDistributorOperator
    from rankzero import InvalidJobError

    with pytest.raises(InvalidJobError, match=re.escape(words)):
        TorchDistributorOperator(task_id="train", **{"train": print, **arguments})


def test_whole_numbers_of_numpy_are_ranks_and_exit_codes(dag: Any) -> None:
    import numpy as np

    from airflow_rankzero import TorchDistributorOperator

    cases = [(np.arange(2), np.int64(99)), ([np.int64(0)], np.array([98, 99])), ((0, 1), 0), (np.array([], int), None)]
    found = []
    for number, (ranks, codes) in enumerate(cases):
        given = {"task_id": f"train{number}", "log_ranks": ranks, "skip_on_exit_code": codes}
        task = TorchDistributorOperator(train=print, **given)
        # A number of numpy has another text.
        found.append(repr((task.log_ranks, task.skip_on_exit_code)))
    assert found == ["([0, 1], [99])", "([0], [98, 99])", "([0, 1], [0])", "([], [])"]


def test_relative_paths_begin_beside_the_dag_file(
    run_dag: RunDag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a module beside it; the worker's own directory has another script of that name, and Airflow's files."""
    dags, elsewhere = tmp_path / "bundle" / "dags", tmp_path / "elsewhere"
    (dags / "code").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(WORLD)
    (elsewhere / "airflow.cfg").write_text("password")
    (dags / "code" / "train.py").write_text(
        "import os, beside, extra\nimport rankzero.train as rt\n"
        "rt.set_result([beside.VALUE, extra.VALUE, os.path.exists('daily.py'), os.path.exists('airflow.cfg')])\n"
    )
    (dags / "code" / "beside.py").write_text("VALUE = 42\n")
    (tmp_path / "bundle" / "extra.py").write_text("VALUE = 43\n")
    (dags / "daily.py").write_text(
        "from airflow.sdk import DAG\n"
        "from airflow_rankzero import TorchDistributorOperator\n"
        "with DAG('scripted') as dag:\n"
        "    TorchDistributorOperator(\n"
        "        task_id='train', train='code/train.py', num_processes=1, conn_id='here',\n"
        f"        store={str(tmp_path / 'store')!r}, working_dir='.', py_files=['../extra.py'],\n"
        "    )\n"
    )
    monkeypatch.chdir(elsewhere)
    outcome = run_dag(runpy.run_path(str(dags / "daily.py"))["dag"])
    assert outcome.xcom("train") == [42, 43, True, False], outcome.errors


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("file:/a b", "file:/a b"),
        ("jdbc:postgresql://host/x", "jdbc:postgresql://host/x"),
        (" file:/a/b", "file:/a/b"),
        ("abfs+x://c/x y", "abfs+x://c/x y"),
        (" /data/x", "/data/x"),
        ("\n./a b\n", "{dags}/a b"),
        (" rows ", "{dags}/rows"),
        ("\nSELECT 1", "SELECT 1"),
        (" ", ""),
        ("data/more", "{dags}/data/more"),
        ("catalog.rows", "catalog.rows"),
        (Path("rows"), "{dags}/rows"),
    ],
)
def test_the_path_of_a_dataset_begins_beside_the_dag_file(tmp_path: Path, given: Any, wanted: str) -> None:
    from airflow_rankzero.hooks import dataset_beside

    (tmp_path / "rows").mkdir()
    found = dataset_beside(str(tmp_path), {"name": given})
    assert found == {"name": wanted.format(dags=tmp_path)}
