"""One rank's process: environment and rendezvous, the call of the user's code, what it reports to its agent.

Imports the standard library, torch, and what pyspark bundles.
"""

from rankzero import lazy_names

lazy_names(__name__, "command.CommandError control.Control failures.describe")
