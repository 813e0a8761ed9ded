"""The agent is the process in one task that starts its ranks, watches them, forwards their output, and ends them.

Modules here import only the standard library and what pyspark bundles. Files in transfer and spooled lines are in the
agent's scratch directory: below ``TMPDIR`` if that is set, else in Spark's local directory with the most space.
The agent removes the directory. It is a child subreaper, so processes that lost their parents come back to it and end
with it; processes that clean up shared memory after others, such as multiprocessing's resource tracker, are ended last.
"""
