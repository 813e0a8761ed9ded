"""Spark Connect as an engine: a barrier stage on a cluster that this machine knows by one gRPC address. No JVM here.

What the tasks do on the executors is `rankzero.engines.spark.stage`, as for a classic session.
"""
