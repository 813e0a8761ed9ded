"""What tests need of Airflow that has another place in another version; the package's own is in `_compat`."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

RunDag = Callable[..., Any]


@functools.cache
def version() -> tuple[int, ...]:
    from airflow import __version__

    return tuple(int(part) for part in re.findall(r"\d+", __version__)[:3])


def needs(major: int, minor: int, what: str) -> None:
    """Skips the test in an Airflow that has not got it yet."""
    if version() < (major, minor):
        pytest.skip(f"Airflow {major}.{minor} is the first with {what}")


def deserialize(encoded: Any) -> Any:
    from airflow_rankzero import _compat

    return _compat._find("serde", "airflow.sdk", "airflow.serialization").deserialize(encoded)


def exception(name: str) -> type[BaseException]:
    from airflow_rankzero import _compat

    return _compat._exception(name)  # type: ignore[no-any-return]


def secrets_masker() -> Any:
    """What makes `***` of the secrets in a text."""
    try:
        from airflow.sdk._shared import secrets_masker
    except ImportError:
        from airflow.sdk.execution_time import secrets_masker
    return secrets_masker


def tested_connection() -> Any:
    """The class of connections that can be tested: before 3.2 the server's own."""
    from airflow.sdk import Connection

    if hasattr(Connection, "test_connection"):
        return Connection
    from airflow.models import Connection as OfServer

    return OfServer


@functools.cache
def give_callbacks_the_exception() -> None:
    """What `dag.test` of 3.1 and 3.2 does not do."""
    if version() >= (3, 3):
        return
    from airflow.sdk.execution_time import task_runner

    run = task_runner.run

    def run_and_tell(ti: Any, context: Any, log: Any) -> Any:
        state, message, error = run(ti, context, log)
        context["exception"] = error
        return state, message, error

    task_runner.run = run_and_tell


def be_a_worker() -> None:
    """Has tasks that run in this process take it for a worker's, for tests of what becomes of it."""
    from airflow_rankzero import _compat

    _compat.is_in_process = lambda: False


def write(dag: Any) -> None:
    """Makes a DAG known in serialized form."""
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session

    with create_session() as session:
        if version() < (3, 2):
            from airflow.serialization.serialized_objects import SerializedDAG
        else:
            from airflow.serialization.definitions.dag import SerializedDAG
        lazy = LazyDeserializedDAG.from_dag(dag)
        SerializedDAG.bulk_write_to_db("dags-folder", None, [lazy], session=session)
        SerializedDagModel.write_dag(lazy, bundle_name="dags-folder", session=session)
