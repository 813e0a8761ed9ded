"""A whole Airflow, which is there for the tests of this directory only: it takes half a core."""

from collections.abc import Iterator

import pytest
from tests.airflow.deployment import Deployment


@pytest.fixture(scope="package")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its scheduler, API server, DAG processor, triggerer and database."""
    deployment = Deployment(tmp_path_factory.mktemp("airflow"))
    try:
        told = ["durable", "forgotten", "failing"]
        deployment.wait_until_ready(["shipped", "endless", "pulling", "secretive", *told])
        yield deployment
    finally:
        deployment.stop()
