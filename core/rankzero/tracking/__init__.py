"""Trackers: they take the events of a run to the systems that a team uses.

This package has `Tracker` and the trackers for MLflow, TensorBoard and the like, which import their libraries when they
are used. `rankzero.driver.trackers` calls them. Nothing here decides about a run.
"""

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero.tracking.mlflow import MLflow
    from rankzero.tracking.opentelemetry import OpenTelemetry
    from rankzero.tracking.registry import ModelVersion, load_model, register_model
    from rankzero.tracking.tensorboard import TensorBoard
    from rankzero.tracking.tracker import Tracker
    from rankzero.tracking.wandb import WandB

__all__ = [
    "MLflow",
    "ModelVersion",
    "OpenTelemetry",
    "TensorBoard",
    "Tracker",
    "WandB",
    "load_model",
    "register_model",
]

lazy_names(
    __name__,
    "mlflow.MLflow opentelemetry.OpenTelemetry registry.ModelVersion registry.load_model registry.register_model "
    "tensorboard.TensorBoard tracker.Tracker wandb.WandB",
)


def __dir__() -> list[str]:
    return __all__
