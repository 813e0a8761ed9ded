"""`Embedded`: a local Spark that the engine starts and whose tasks use this machine and this Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankzero.engines.spark.conf import LOCAL, TASK_CPUS, THREADS, spark_defaults
from rankzero.engines.spark.jvm import own_python
from rankzero.engines.spark.stage import task_config
from rankzero.job import Job
from rankzero.task.hold import with_defaults
from rankzero.task.start import load_time

_EXECUTOR_ENV = "spark.executorEnv."


@dataclass(frozen=True)
class Embedded:
    """The settings of such a Spark, from this process and from its conf."""

    conf: Mapping[str, str]

    @staticmethod
    def of(master: str, conf: Mapping[str, str]) -> Embedded | None:
        """Returns the settings; None for a cluster, or if the user chose another Python for the ranks."""
        known = {**spark_defaults(), **conf}
        return Embedded(known) if LOCAL.fullmatch(master) and own_python(known) == sys.executable else None

    @property
    def cores(self) -> int:
        """Cores of one task."""
        return int(self.conf.get(TASK_CPUS, "1"))

    def config(self, job: Job, env: Mapping[str, str]) -> dict[str, Any]:
        """Returns the part of an agent's configuration that only an embedded Spark has.

        This process owns the warm server, and determines the variables with which it loads torch. So the server can
        start before the tasks do, which then find it.

        Args:
            job: The job that runs.
            env: The user's environment for the ranks.
        """
        import rankzero

        # Spark sets this variable in its Python workers, too.
        spark = {"PYTHONHASHSEED": "0", **os.environ, **self._executor_env()}
        config = task_config({"env": env}, self.cores, job.processes_per_task, threads_set=THREADS in self.conf)
        return {
            "loaded": load_time({**spark, **with_defaults(config)}),
            "owner": os.getpid(),
            "code_path": os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__))),
        }

    def _executor_env(self) -> dict[str, str]:
        return {
            name.removeprefix(_EXECUTOR_ENV): value
            for name, value in self.conf.items()
            if name.startswith(_EXECUTOR_ENV)
        }
