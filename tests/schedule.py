"""Which files of tests share a process, where several processes run the suite."""

import posixpath
from typing import Any

import pytest

TOGETHER = {
    "tests/airflow/deployed/": "one whole Airflow",
    "tests/airflow/": "Airflow in their process",
    "tests/contract/engines/test_connect.py": "one Spark Connect server",
    "tests/contract/data/test_connect_frames.py": "one Spark Connect server",
    "tests/faults/test_connect.py": "one Spark Connect server",
    "tests/contract/engines/test_spark_cluster.py": "one standalone cluster",
    "tests/contract/engines/test_spark_submit.py": "one standalone cluster",
    "tests/contract/data/test_dataframe.py": "one JVM",
    "tests/contract/data/test_materialization_faults.py": "one JVM",
    "tests/contract/data/test_paths.py": "one JVM",
    "tests/contract/data/test_row_types.py": "one JVM",
    "tests/dagster/test_dagster_asset.py": "one JVM",
    "tests/contract/engines/test_spark.py": "another JVM",
    "tests/contract/engines/test_bare_executors.py": "another JVM",
    "tests/contract/engines/test_resources.py": "another JVM",
    "tests/contract/launch_counts/test_launch_cost.py": "another JVM",
    "tests/doors/compat/test_ray_train.py": "another JVM",
    "tests/doors/compat/test_ray_train_lightning.py": "another JVM",
    "tests/doors/compat/test_torch_distributor.py": "another JVM",
    "tests/doors/compat/horovod/test_hvd_doors.py": "another JVM",
}
"""The expensive thing that files share, by file or folder; every other file is a group of its own."""


def scope_of(nodeid: str) -> str:
    """Returns the name of the group of tests that run in one process, in their order."""
    path = nodeid.partition("::")[0]
    return TOGETHER.get(path) or TOGETHER.get(posixpath.dirname(path) + "/") or path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes the scheduler by which the tests of a group share a process, and so what their fixtures start.

    The suite has a scheduler of its own, since xdist 3.8 does not see the marks ``xdist_group`` with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    # In the order of the collection.
    config.option.loadscopereorder = False
    return ByGroup(config, log)
