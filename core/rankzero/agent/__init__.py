"""The agent is the process in one task that starts its ranks, watches them, forwards their output, and ends them.

Modules here import only the standard library and what pyspark bundles. Files in transfer and spooled lines are in the
agent's scratch directory: below ``TMPDIR`` if that is set, else in Spark's local directory with the most space. A
worker's ``TMPDIR`` is there, too, or in a directory below ``/tmp``, since multiprocessing's sockets need short paths.
The agent removes both. It is a child subreaper, so processes that lost their parents come back to it and end with it;
processes that clean up shared memory after others, such as multiprocessing's resource tracker, are ended last.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "output.is_own_frame output.LineSplitter output.MAX_LINE ranks.Ending ranks.Rank ranks.visible_gpus",
)
