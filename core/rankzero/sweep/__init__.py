"""Sweeps run one training with many sets of arguments on one engine and find the best of them.

`trials` starts and follows the runs. `stopping` decides with pure functions which trials end early. `search` gets the
next arguments from an optimizer such as Optuna. A trial is an ordinary run with its own run directory.
"""

from rankzero.sweep.search import OptunaSearch, Search
from rankzero.sweep.stopping import MedianRule, StopRule, SuccessiveHalving
from rankzero.sweep.trials import Sweep, Trial

__all__ = ["MedianRule", "OptunaSearch", "Search", "StopRule", "SuccessiveHalving", "Sweep", "Trial"]
