"""What happens in a run, for the systems that teams have.

Lives here: `Tracker`, and those for MLflow, TensorBoard and the like, which import their libraries when they are used.
May not live here: when they are called (`rankzero.driver.trackers`), and anything that decides about a run.
"""

from rankzero.tracking.notify import Notice, Notify
from rankzero.tracking.tracker import Tracker

__all__ = ["Notice", "Notify", "Tracker"]
