"""The Spark Connect engine: a barrier stage on a cluster that is reached by one gRPC address, without a local JVM.

Its tasks run `rankzero.engines.spark.stage` on the executors, like those of a classic session.
"""
