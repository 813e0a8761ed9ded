"""Trackers: they take the events of a run to the systems that a team uses.

This package has `Tracker` and the trackers for MLflow and TensorBoard, which import their libraries when they are used.
`rankzero.driver.driver` calls them. Nothing here decides about a run.
"""

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero.tracking.mlflow import MLflow
    from rankzero.tracking.tensorboard import TensorBoard
    from rankzero.tracking.tracker import Tracker

__all__ = ["MLflow", "TensorBoard", "Tracker"]

lazy_names(__name__, "mlflow.MLflow tensorboard.TensorBoard tracker.Tracker")
