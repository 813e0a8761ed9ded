"""Spark as an engine: the session, the barrier stage, what is asked of a context once, its errors in plain words.

The only room that knows pyspark.
"""
