"""Advice for names of Ray Train that have no meaning here, and the module attributes that raise it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

_TUNE = "Launcher.map runs a training for each of several parameters"
_VALIDATE = "validate in the training function, or in a step of the pipeline behind the training"
_PREDICT = "load the checkpoint with torch.load, and score with rankzero.train.write_rows"

INSTEAD = {
    "accelerate": "Ray has removed it: use rankzero.train.autocast() and grad_scaler()",
    "backward": "Ray has removed it: call loss.backward(); see rankzero.train.grad_scaler",
    "prepare_optimizer": "Ray has removed it: use the optimizer as it is",
    "AcquiredResources": "the cluster's configuration decides about resources",
    "BackendConfig": "give a TorchConfig as torch_config",
    "DataBatchType": "annotate batches as dict[str, torch.Tensor]",
    "DatasetConfig": "give DataConfig(datasets_to_split=[...]) as dataset_config",
    "LoggingConfig": 'use logging.getLogger("rankzero").setLevel(...)',
    "PreemptionError": 'catch TrainingFailedError, whose cause is "preempted"',
    "PreemptionInfo": "get_preemption_info() returns None here: clusters give no notice of a preemption",
    "ResourceRequest": "the cluster's configuration decides about resources",
    "SyncConfig": "checkpoints are in the store when they are committed",
    "TorchCheckpoint": "torch.save a state into a directory, and give Checkpoint.from_directory(directory)",
    "TorchDetectionPredictor": _PREDICT,
    "TorchPredictor": _PREDICT,
    "TrainingIterator": "fit() follows the run; Launcher.submit returns a handle with its events and metrics",
    "ValidationConfig": _VALIDATE,
    "ValidationFn": _VALIDATE,
    "ValidationTaskConfig": _VALIDATE,
    "get_metadata": "put metadata into train_loop_config",
    "get_trial_dir": f"there are no trials, and workers run in directories of their own; {_TUNE}",
    "get_trial_id": f"there are no trials: use get_experiment_name(); {_TUNE}",
    "get_trial_name": f"there are no trials: use get_experiment_name(); {_TUNE}",
    "get_trial_resources": "the cluster's configuration decides about resources",
    # Modules.
    "data": "give torch data sets, Spark DataFrames or paths of tables as datasets",
    "horovod": "use rankzero.compat.horovod",
    "init": "the launcher connects to the cluster: TorchTrainer(launcher=Launcher(engine=...))",
    "jax": "rankzero trains torch: use TorchTrainer",
    "lightgbm": "rankzero trains torch: use TorchTrainer, or LightGBM's own Spark estimators",
    "tensorflow": "rankzero trains torch: use TorchTrainer",
    "tune": _TUNE,
    "v2": "the names of Train V2 are in rankzero.compat.ray_train itself",
    "xgboost": "rankzero trains torch: use TorchTrainer, or xgboost.spark",
}
"""Advice by name. Import and access raise it; names of each module stand in docs/migrate-ray-train.md."""


class _Advice(importlib.abc.MetaPathFinder):
    """The last importer, for modules that this package lacks: their import calls no ``__getattr__``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises ImportError with the advice for a name below this package, if there is one."""
        module, _, last = name.rpartition(".")
        if module.startswith(__package__) and last in INSTEAD:
            raise ImportError(f"{module} has no {last}: {INSTEAD[last]}")


_advice = _Advice()
sys.meta_path.append(_advice)


def lookup(module: str, *submodules: str, **defined_in: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``.

    It imports the named modules of this package when they are used, and raises ImportError with advice for a name that
    Ray has and this package has not.

    Args:
        module: Name of the module.
        submodules: The modules in ``rankzero.compat.ray_train`` that are attributes of the module.
        defined_in: Attributes of the module, each with the module in ``rankzero.compat.ray_train`` that defines it.
    """
    modules = {path.rpartition(".")[2]: path for path in submodules}

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{__package__}.{modules[name]}")
        if name in defined_in:
            return getattr(importlib.import_module(f"{__package__}.{defined_in[name]}"), name)
        _advice.find_spec(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
