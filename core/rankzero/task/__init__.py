"""Code that runs in Spark's Python worker, or in the driver for a local engine: it starts the agent and watches it.

The task function is pickled by value, so modules here import only the standard library, each other, and
numbers of `rankzero.bounds` by their names.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "hold.make_scratch hold.remove_abandoned stage.ATTEMPT stage.OVER stage.put stage.run_task stage.sealed "
    "start.OWNER start.load_time start.start_time",
)
