"""What OpenLineage learns of a training, and what Spark's own listener learns of the task.

Lives here: all that imports the OpenLineage provider or its client, which need not be installed (`facet` is imported
only where they are). May not live here: anything that a task needs to succeed.
"""
