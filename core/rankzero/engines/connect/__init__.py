"""The Spark Connect engine: a barrier stage on a cluster that is reached by one gRPC address, without a local JVM.

Its tasks run `rankzero.engines.spark.stage` on the executors, like those of a classic session. All launches of a user
share a session of the server: docs/decisions/012-one-shared-session-of-spark-connect.md. A run that outlives its caller
is driven in its own stage, beside the agent of task 0. An agent's disconnect on the channel counts as its end there,
since the report of its task arrives later. No reader checks the process of such a driver: readers use its heartbeat.
"""
