"""The agent is the process in one task that starts its ranks, watches them, forwards their output, and ends them.

Modules here import only the standard library and what pyspark bundles.
"""

from rankzero import lazy_names

lazy_names(__name__, "kept.KEPT kept.KeptFiles lines.is_own_frame lines.LineSplitter lines.MAX_LINE ranks.visible_gpus")
