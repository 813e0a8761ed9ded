"""What happens in a run, for the systems that teams have.

Lives here: `Tracker`, and those for MLflow, TensorBoard and the like, which import their libraries when they are used.
May not live here: when they are called (`rankzero.driver.trackers`), and anything that decides about a run.
"""

from rankzero.tracking.mlflow import MLflow
from rankzero.tracking.notify import Notice, Notify
from rankzero.tracking.opentelemetry import OpenTelemetry
from rankzero.tracking.registry import ModelVersion, load_model, register_model
from rankzero.tracking.statsd import StatsD
from rankzero.tracking.tensorboard import TensorBoard
from rankzero.tracking.tracker import Tracker
from rankzero.tracking.wandb import WandB

__all__ = [
    "MLflow",
    "ModelVersion",
    "Notice",
    "Notify",
    "OpenTelemetry",
    "StatsD",
    "TensorBoard",
    "Tracker",
    "WandB",
    "load_model",
    "register_model",
]
