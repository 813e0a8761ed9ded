"""The agent: the process in one task that starts its ranks, watches them, forwards what they write, and ends them.

Imports the standard library and what pyspark bundles.
"""
