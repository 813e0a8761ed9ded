"""What a training function may call: `get_context`, `report`, `get_checkpoint`, `set_result`.

Runs inside workers, so only the standard library and torch may be imported here. Outside of a run
the same calls work as a world of one rank, so that a training function can be tried and tested
without a launcher.
"""

from rankzero.train.checkpoint import Checkpoint
from rankzero.train.context import TrainContext, get_checkpoint, get_context, report, set_result

__all__ = ["Checkpoint", "TrainContext", "get_checkpoint", "get_context", "report", "set_result"]
