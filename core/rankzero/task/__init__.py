"""Code that runs in Spark's Python worker, or in the driver for a local engine: it starts the agent and watches it.

The task function is pickled by value, so modules here import only the standard library, each other, and
numbers of `rankzero.bounds` by their names.
"""
