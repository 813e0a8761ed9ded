"""Lineage of a training for OpenLineage, and properties that name the task to Spark's own listener.

Only this package imports the OpenLineage provider or its client; both are optional, and `facet` is imported only if
they are installed. A task succeeds without this package.
"""
