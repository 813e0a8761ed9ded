"""What runs in Spark's Python worker, or in the driver for a local engine: it starts the agent and holds it.

Pickled by value, so it imports the standard library only, and nothing of rankzero from another room.
"""

from rankzero import lazy_names

lazy_names(__name__, "hold.NEW hold.remove_abandoned start.OWNER start.start_time")
