"""How the fields of an Airflow connection become a Spark master and configuration."""

import logging
from typing import Any

import pytest

from rankzero import InvalidJobError


def target(**fields: Any) -> Any:
    from airflow.sdk import Connection

    from airflow_rankzero.connection import SparkTarget

    return SparkTarget.from_connection(Connection(conn_id="cluster", **{"conn_type": "spark", **fields}))


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


def test_master_of_a_connection_uri() -> None:
    from airflow.sdk import Connection

    from airflow_rankzero.connection import SparkTarget

    connection = Connection.from_uri("spark://head:7078", conn_id="cluster")
    assert SparkTarget.from_connection(connection).master == "spark://head:7078"


def test_extra_becomes_configuration(caplog: pytest.LogCaptureFixture) -> None:
    extra = '{"queue": "night", "namespace": "ml", "deploy-mode": "client", "spark-binary": "spark3-submit"}'
    with caplog.at_level(logging.WARNING):
        found = target(host="yarn", extra=extra, login="ada", password="geheim")
    assert found.conf == {"spark.yarn.queue": "night", "spark.kubernetes.namespace": "ml"}
    assert "geheim" not in repr(found)
    assert caplog.messages == []


def test_extra_without_effect_is_named_but_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        target(host="yarn", extra='{"keytab": "geheim", "queue": "night"}')
    assert "keytab" in caplog.text
    assert "geheim" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"conn_type": "spark_connect", "host": "head"}, "'spark_connect'"),
        ({"conn_type": "http", "host": "head"}, "'http'"),
        ({"host": None}, "names no host"),
        ({"host": "yarn", "extra": '{"deploy-mode": "cluster"}'}, "'cluster'"),
        ({"host": "yarn", "extra": '["queue"]'}, "not a JSON object"),
    ],
)
def test_what_a_run_cannot_use_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJobError, match="'cluster'") as caught:
        target(**fields)
    # The message names the connection and what is wrong with it.
    assert words in str(caught.value)
