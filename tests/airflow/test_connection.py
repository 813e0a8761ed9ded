"""How the fields of an Airflow connection become the place where a training runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions

from rankzero import InvalidJobError, LocalEngine, SparkConnectEngine, SparkEngine


def target(**fields: Any) -> Any:
    from airflow.sdk import Connection

    from airflow_rankzero.hooks import Target

    return Target.from_connection(Connection(conn_id="cluster", **{"conn_type": "spark", **fields}))


@pytest.mark.parametrize(
    ("host", "port", "master"),
    [
        ("spark://head", 7078, "spark://head:7078"),
        ("spark://head", None, "spark://head:7077"),
        ("spark://head:7078", None, "spark://head:7078"),
        ("spark://one:7077,two:7077", None, "spark://one:7077,two:7077"),
        ("head", 7078, "spark://head:7078"),
        ("yarn-gateway", None, "spark://yarn-gateway:7077"),
        ("localhost", 7077, "spark://localhost:7077"),
        ("yarn", None, "yarn"),
        ("yarn", 8032, "yarn"),
        ("local[2]", None, "local[2]"),
        ("local-cluster[2,1,1024]", None, "local-cluster[2,1,1024]"),
        ("k8s://https://api", 6443, "k8s://https://api:6443"),
        ("k8s://https://api", None, "k8s://https://api"),
    ],
)
def test_host_and_port_become_the_master(host: str, port: int | None, master: str) -> None:
    assert target(host=host, port=port).master == master


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "head"}, "sc://head"),
        ({"host": "sc://head", "port": 15003}, "sc://head:15003"),
        (
            {"host": "head", "port": 443, "login": "ada", "password": "geh;eim", "extra": '{"use_ssl": true}'},
            "sc://head:443/;user_id=ada;token=geh%3Beim;use_ssl=true",
        ),
    ],
)
def test_a_spark_connect_connection_is_read_as_its_own_hook_reads_it(fields: dict[str, Any], url: str) -> None:
    found = target(conn_type="spark_connect", **fields)
    assert found.engine({"spark.executor.memory": "8g"}) == SparkConnectEngine(url)
    assert "geh" not in repr(found)


def rankzero(**extra: Any) -> Any:
    host = extra.pop("host", "spark://head")
    return target(conn_type="rankzero", host=host, extra=json.dumps(extra))


def test_every_field_of_the_form_is_read() -> None:
    from airflow_rankzero.provider_info import CONN_FIELDS

    given = {
        "engine": "spark",
        "store": "s3://bucket/runs",
        "deploy_mode": "client",
        "use_gpu": True,
        "processes_per_task": 4,
        "conf": {"spark.executor.cores": 2, "spark.ui.enabled": False},
    }
    assert set(given) == set(CONN_FIELDS)
    found = rankzero(**given)
    assert found.engine() == SparkEngine(
        master="spark://head:7077", conf={"spark.executor.cores": "2", "spark.ui.enabled": "false"}
    )
    assert (found.store, found.use_gpu, found.processes_per_task) == ("s3://bucket/runs", True, 4)


@pytest.mark.parametrize(
    "extra",
    [{}, {"engine": None, "store": "", "deploy_mode": None, "use_gpu": None, "processes_per_task": None, "conf": None}],
)
def test_what_a_form_left_empty_says_nothing(extra: dict[str, Any]) -> None:
    found = rankzero(**extra)
    assert found.engine() == SparkEngine(master="spark://head:7077")
    assert (found.store, found.use_gpu, found.processes_per_task) == (None, False, None)


def test_words_of_a_uri_are_read_as_what_they_mean() -> None:
    from airflow.sdk import Connection

    from airflow_rankzero.hooks import Target

    uri = "rankzero://head:7078/?use_gpu=true&processes_per_task=2&conf=%7B%22spark.executor.memory%22%3A+%228g%22%7D"
    found = Target.from_connection(Connection.from_uri(uri, conn_id="cluster"))
    assert found == Target("spark", "spark://head:7078", {"spark.executor.memory": "8g"}, None, True, 2)
    assert Target.from_connection(Connection.from_uri("spark://head:7078", conn_id="x")).master == "spark://head:7078"
    # Airflow's own test of a connection passes it on as a URI.
    for host in ("local[4]", "k8s://https://api:6443", "spark://one:7077,two:7077", "yarn", "sc://head:15002"):
        connection = Connection(conn_id="cluster", conn_type="rankzero", host=host, extra='{"use_gpu": true}')
        again = Target.from_connection(Connection.from_uri(connection.get_uri(), conn_id="cluster"))
        assert again == Target.from_connection(connection) == Target("spark", host, use_gpu=True)


def test_local_engine_needs_no_master_and_leaves_spark_conf_alone() -> None:
    found = rankzero(engine="local", host=None)
    assert found.engine({"spark.executor.memory": "8g"}) == LocalEngine()


def test_configuration_of_the_task_wins() -> None:
    found = rankzero(conf={"a": "1", "b": "2"})
    assert found.engine({"b": "3"}).conf == {"a": "1", "b": "3"}


def test_secrets_of_the_configuration_are_masked_in_logs() -> None:
    redact = versions.secrets_masker().redact
    found = rankzero(conf={"spark.hadoop.fs.s3a.secret.key": "geheimnis-eins"})
    assert "geheimnis" not in repr(found)
    assert "geheimnis" not in redact("the key is geheimnis-eins")
    found.engine({"spark.ssl.keyPassword": "geheimnis-zwei"})
    assert "geheimnis" not in redact("the password is geheimnis-zwei")


def test_extra_becomes_configuration() -> None:
    extra = '{"queue": "night", "namespace": "ml", "deploy-mode": "client", "spark-binary": "spark3-submit"}'
    found = target(host="yarn", extra=extra, login="ada", password="geheim")
    assert found.conf == {"spark.yarn.queue": "night", "spark.kubernetes.namespace": "ml"}
    assert "geheim" not in repr(found)


@pytest.mark.parametrize(
    ("kind", "extra"), [("spark", '{"deploy-mode": "cluster"}'), ("rankzero", '{"deploy_mode": "cluster"}')]
)
def test_a_connection_may_have_its_drivers_on_the_cluster(kind: str, extra: str) -> None:
    from rankzero import SparkEngine, SparkSubmitEngine

    on_cluster = target(conn_type=kind, host="spark://head", extra=extra)
    assert on_cluster.engine({"spark.driver.memory": "2g"}) == SparkSubmitEngine(
        "spark://head:7077", conf={"spark.driver.memory": "2g"}
    )
    assert type(target(conn_type=kind, host="spark://head").engine()) is SparkEngine


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"conn_type": "spark_connect"}, "names no host"),
        ({"conn_type": "spark_connect", "host": "head", "extra": '{"use_ssl": "yes"}'}, "use_ssl 'yes'"),
        ({"conn_type": "http", "host": "head"}, "'http'"),
        ({"host": "mesos://head"}, "'mesos'"),
        ({"conn_type": "rankzero"}, "names no host"),
        ({"conn_type": "rankzero", "extra": '{"engine": "ray"}'}, "'ray'"),
        ({"conn_type": "rankzero", "extra": '{"usegpu": true}'}, "usegpu"),
        ({"conn_type": "rankzero", "host": "head", "extra": '{"use_gpu": "yes"}'}, "use_gpu 'yes'"),
        ({"conn_type": "rankzero", "host": "head", "extra": '{"processes_per_task": 0}'}, "processes_per_task 0"),
        ({"conn_type": "rankzero", "host": "head", "extra": '{"conf": "[1]"}'}, "conf is not a JSON object"),
        ({"host": "yarn", "extra": '{"deploy-mode": "clusters"}'}, "deploy-mode 'clusters'"),
        ({"host": "yarn", "extra": '["queue"]'}, "not a JSON object"),
    ],
)
def test_what_a_run_cannot_use_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJobError, match="'cluster'") as caught:
        target(**fields)
    # The message names the connection and what is wrong with it.
    assert words in str(caught.value)


def test_without_pyspark_the_embedded_engine_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_rankzero.hooks import Target

    assert Target().engine() == SparkEngine()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Target().engine() == LocalEngine()
    # These ask for Spark, so a run is refused with the line that installs it.
    assert Target().engine({"spark.executor.memory": "1g"}) == SparkEngine(conf={"spark.executor.memory": "1g"})
    assert Target(master="local[2]").engine() == SparkEngine(master="local[2]")


# -- the test of a connection, in words, without a JVM ------------------------------------------


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Tests a connection the way Airflow does and returns what it says."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test(host: str | None = None, **extra: Any) -> tuple[bool, str]:
        extra = {"store": str(tmp_path), **extra}
        given = {"conn_type": "rankzero", "host": host, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(given))
        connection = versions.tested_connection()(
            conn_id="cluster", conn_type="rankzero", host=host, extra=json.dumps(extra)
        )
        return connection.test_connection()

    return test


def test_problems_and_the_lack_of_them_are_told(tell: Any, tmp_path: Path) -> None:
    ok, words = tell(engine="local")
    assert ok, words
    assert "no problem found" in words
    assert f"run directories in {tmp_path}" in words
    ok, words = tell(host="spark://head", store="nosuch://bucket", use_gpu=True, processes_per_task=2)
    assert not ok
    assert "'nosuch://bucket' cannot be written" in words
    ok, words = tell(engine="ray")
    assert not ok
    assert "engine 'ray'; choose spark or local" in words


def test_the_command_examines_a_connection(tell: Any, tmp_path: Path) -> None:
    """`rankzero doctor --conn-id`, by the entry point that this package has for it."""
    from click.testing import CliRunner

    from airflow_rankzero.hooks import RankZeroHook
    from rankzero.cli import main

    tell(engine="local")
    assert RankZeroHook("cluster").get_conn().kind == "local"
    told = CliRunner().invoke(main, ["doctor", "--conn-id", "cluster", "--json"])
    assert told.exit_code == 0, told.output
    examination = json.loads(told.stdout)
    assert examination["healthy"]
    assert len(examination["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []
    told = CliRunner().invoke(main, ["doctor", "--conn-id", "nobody"])
    assert told.exit_code == 1
    assert "there is no connection conn_id='nobody'" in told.output
