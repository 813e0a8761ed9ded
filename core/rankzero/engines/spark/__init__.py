"""The Spark engine: the session, the barrier stage, properties of a context, and Spark's errors in plain words.

Only this package imports pyspark. On an embedded Spark, the driver's process also starts the zygote of the
ranks, before the JVM. `submit` starts the driver on the cluster: the first status then
has the time for which the run counts as alive without a heartbeat, a refused submission claims the driver's file and
writes the failure, and so does a cancel before the driver has started.
"""
