"""Drop-in replacements for other launchers, so that code moves to rankzero by changing its imports.

A replacement translates names and arguments only. An argument that has no equivalent raises an error that names it.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

HOROVOD = "RANKZERO_HOROVOD"
"""Environment variable: set to ``1`` in ``env=``, ``import horovod.torch`` finds `rankzero.compat.horovod` in ranks."""

_IN_RANKS = {HOROVOD: "rankzero.compat.horovod"}
"""Environment variables, each with the module whose ``enter_rank`` a rank calls first if the variable is ``1``."""


def enter_rank(context: Mapping[str, Any]) -> None:
    """Prepares a rank for the replacements that its environment names, before the training is loaded.

    Args:
        context: The ranks and world sizes, by the names of `rankzero.train.TrainContext`.
    """
    for variable, module in _IN_RANKS.items():
        if os.environ.get(variable) == "1":
            importlib.import_module(module).enter_rank(context)
