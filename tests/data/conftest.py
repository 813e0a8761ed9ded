"""A SparkSession whose Python workers start quickly: queries of these tests start dozens of them."""

import os
from collections.abc import Iterator

import pytest
from tests.conftest import restore_signal_handlers, signal_handlers

CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "tests.spark_daemon",
}


@pytest.fixture(scope="module")
def session() -> Iterator[object]:
    """A SparkSession of the test's own process, made as users make it: no PYSPARK_PYTHON."""
    from pyspark.sql import SparkSession

    os.environ.pop("PYSPARK_PYTHON", None)
    handlers = signal_handlers()
    spark = SparkSession.builder.master("local[4]").config(map=CONF).getOrCreate()
    restore_signal_handlers(handlers)
    yield spark
    spark.stop()
