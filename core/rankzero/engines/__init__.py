"""Engines start agents: as processes of this machine (`local`), or as tasks of a Spark cluster (`spark`, `connect`).

An engine is a frozen description; `Engine.open` makes the session that a driver uses. An engine knows nothing of
ranks, results or attempts, and the driver knows nothing of Spark.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "base.AgentConfig base.AgentGroup base.Engine base.EngineSession base.OnEnd "
    "connect.stage.StageEngine "
    "gpus.GpuClaims gpus.local_gpus local.LocalGroup local.LocalSession local.LOOPBACK spark.materialize.row_hash "
    "spark.conf.conf_for spark.conf.spark_defaults spark.context.known "
    "spark.errors.explain spark.jvm.find_java spark.materialize.content_of spark.materialize.materialize "
    "spark.conf.task_resources spark.conf.TaskResources spark.stage.make_task "
    "spark.stage.with_own_python",
)
