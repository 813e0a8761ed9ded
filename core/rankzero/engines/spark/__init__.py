"""The Spark engine. Only this package imports pyspark.

`submit` starts the driver on the cluster; a refused submission claims the driver's file and writes the failure, and so
does a cancel before the driver has started.
"""
