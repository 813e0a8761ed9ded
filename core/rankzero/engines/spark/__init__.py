"""The Spark engine: the session, the barrier stage, properties of a context, and Spark's errors in plain words.

Only this package imports pyspark.
"""
