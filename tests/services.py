"""Sessions and servers that many files of tests use. A pytest plugin, which `tests/conftest.py` loads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.handlers import restore_signal_handlers, signal_handlers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.contract.engines.connect_server import ConnectServer
    from tests.s3 import S3Server

JVM_TIMEOUT = 60.0  # Seconds for a JVM to end by itself: it removes its files, and other suites may be at work


def end_own_jvm() -> None:
    """Ends the Spark gateway that pyspark started in this process, as the end of the process would.

    A session that stops while its tasks start may leave a Python daemon: Spark starts another one when it has just
    stopped the first, and that lives, with its workers, as long as the JVM.
    """
    pyspark = sys.modules.get("pyspark")
    gateway = pyspark and pyspark.SparkContext._gateway
    if gateway is not None and hasattr(gateway, "proc"):
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(JVM_TIMEOUT)


def start_own_jvm() -> None:
    """Starts pyspark's JVM in this process without a configuration, if it does not run.

    A JVM that a SparkContext starts keeps the configuration of that context, and gives it to all later ones.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized()


@contextlib.contextmanager
def spark_session(master: str, **conf: str) -> Iterator[SparkSession]:
    """Starts a session in this process, and stops it. No later session has any of its configuration."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    start_own_jvm()
    assert SparkContext._active_spark_context is None
    handlers = signal_handlers()
    spark = SparkSession.builder.master(master).config(map={"spark.ui.enabled": "false", **conf}).getOrCreate()
    # A SparkContext takes SIGINT, and leaves its handler.
    restore_signal_handlers(handlers)
    try:
        yield spark
    finally:
        spark.stop()


@pytest.fixture(scope="module")
def default_python() -> Iterator[None]:
    """Unsets PYSPARK_PYTHON, which users have not set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYSPARK_PYTHON", raising=False)
        yield


@pytest.fixture(scope="module")
def session(default_python: None) -> Iterator[SparkSession]:
    """Returns a SparkSession of the test's own process."""
    with spark_session("local[4]") as spark:
        yield spark


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Returns one S3 server for all tests that need it."""
    from tests.s3 import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """Returns one Spark Connect server with four slots for all tests that need it."""
    from tests.contract.engines.connect_server import connect_server

    with connect_server(tmp_path_factory.mktemp("connect")) as started:
        yield started


@pytest.fixture(scope="module")
def connect_session(server: ConnectServer) -> Iterator[Any]:
    """Returns a Spark Connect session of the test's own process."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        # Restores it, which pyspark sets and leaves.
        patch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = SparkSession.builder.remote(server.url).create()
        yield session
        session.stop()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Returns the URL of an empty bucket that every process of the test can reach."""
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"test-{os.getpid()}-{tmp_path.name}".replace("_", "-").lower()[:60]
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
