"""The agent: the process in one task that starts its ranks, watches them, forwards what they write, and ends them.

Imports the standard library and what pyspark bundles.
"""

from rankzero import lazy_names

lazy_names(__name__, "kept.KEPT kept.KeptFiles lines.is_own_frame lines.LineSplitter lines.MAX_LINE ranks.visible_gpus")
