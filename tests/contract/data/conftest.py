"""A SparkSession whose Python workers start quickly: queries of these tests start dozens of them."""

from collections.abc import Iterator

import pytest
from tests.services import spark_session

CONF = {
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "tests.spark_daemon",
}


@pytest.fixture(scope="module")
def session(default_python: None) -> Iterator[object]:
    """A SparkSession of the test's own process. `test_materialization_faults` has one with Spark's own daemon."""
    with spark_session("local[4]", **CONF) as spark:
        yield spark
