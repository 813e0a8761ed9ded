"""One rank's process: it sets up environment and rendezvous, calls the user's code, and reports to its agent.

Modules here import only the standard library, torch, and what pyspark bundles.
"""

from rankzero import lazy_names

lazy_names(__name__, "command.CommandError control.Control failures.describe")
