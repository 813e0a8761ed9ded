"""The agent is the process in one task that starts its ranks, watches them, forwards their output, and ends them.

Modules here import only the standard library and what pyspark bundles. The agent is a child subreaper, so processes
that lost their parents come back to it and end with it; those that clean up shared memory after others are ended last.
"""
