"""The Spark Connect engine: a barrier stage on a cluster that is reached by one gRPC address, without a local JVM.

Its tasks run `rankzero.engines.spark.stage` on the executors, like those of a classic session. All launches of a user
share a session of the server: docs/architecture.md#one-shared-session-of-spark-connect.

A run that outlives its caller is driven in its own stage, if its directory is a path: task 0 starts the driver beside
its agent, on the engine of `rankzero.engines.connect.stage`. If the stage fails before its driver has claimed the
submission, the submitter drives it, which else only keeps the connection. Attempts restart within the stage. Driver and
tasks exchange files in a folder of the submission (`rankzero.task.stage`), which show no secret.
"""
