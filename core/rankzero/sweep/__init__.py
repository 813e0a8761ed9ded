"""Sweeps: one training with many sets of arguments, on one engine, and the best of them.

`trials` starts and follows the runs, `stopping` decides as pure functions which of them are not worth going on,
`search` asks somebody else for the next arguments. A trial is an ordinary run, with its run directory.
"""

from rankzero.sweep.search import OptunaSearch, Search
from rankzero.sweep.stopping import MedianRule, StopRule, SuccessiveHalving
from rankzero.sweep.trials import Sweep, Trial

__all__ = ["MedianRule", "OptunaSearch", "Search", "StopRule", "SuccessiveHalving", "Sweep", "Trial"]
