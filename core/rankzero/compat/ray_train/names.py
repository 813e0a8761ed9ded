"""Advice for names of Ray Train that have no meaning here, and the module attributes that raise it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

_TUNE = "Launcher.map runs a training for each of several parameters"

_NAMES = {
    "Ray has removed it: use rankzero.train.autocast() and grad_scaler()": "accelerate",
    "Ray has removed it: call loss.backward(); see rankzero.train.grad_scaler": "backward",
    "Ray has removed it: use the optimizer as it is": "prepare_optimizer",
    "annotate batches as dict[str, torch.Tensor]": "DataBatchType",
    'catch TrainingFailedError, whose cause is "preempted"': "PreemptionError",
    "checkpoints are in the store when they are committed": "SyncConfig",
    "fit() follows the run; Launcher.submit returns a handle with its events and metrics": "TrainingIterator",
    "get_preemption_info() returns None here: clusters give no notice of a preemption": "PreemptionInfo",
    "give DataConfig(datasets_to_split=[...]) as dataset_config": "DatasetConfig",
    "give a TorchConfig as torch_config": "BackendConfig backend",
    "give torch data sets, Spark DataFrames or paths of tables as datasets": "data",
    "torch.load the checkpoint, and score with rankzero.train.write_rows": "TorchDetectionPredictor TorchPredictor",
    "import TorchTrainer or TrainingFailedError from rankzero.compat.ray_train": "base_trainer data_parallel_trainer",
    "put metadata into train_loop_config": "get_metadata",
    "rankzero trains torch: use TorchTrainer": "jax tensorflow",
    "rankzero trains torch: use TorchTrainer, or LightGBM's own Spark estimators": "lightgbm",
    "rankzero trains torch: use TorchTrainer, or xgboost.spark": "xgboost",
    "the cluster's configuration decides about resources": "AcquiredResources ResourceRequest get_trial_resources",
    "the launcher connects to the cluster: TorchTrainer(launcher=Launcher(engine=...))": "init shutdown",
    "the names of Train V2 are in rankzero.compat.ray_train itself": "v2",
    "torch.save a state into a directory, and give Checkpoint.from_directory(directory)": "TorchCheckpoint",
    "use Launcher(trackers=[...]), or the tracker's own library in the training function": "integrations",
    'use RunConfig(worker_runtime_env={"env_vars": {...}})': "runtime_env",
    'use logging.getLogger("rankzero").setLevel(...)': "LoggingConfig",
    "use TorchTrainer": "BaseTrainer DataParallelTrainer LightningConfigBuilder LightningTrainer TransformersTrainer",
    "use rankzero.compat.horovod": "horovod",
    "validate in the training function, or in a step of the pipeline behind the training": "ValidationConfig "
    "ValidationFn ValidationTaskConfig",
    f"there are no trials, and workers run in directories of their own; {_TUNE}": "get_trial_dir",
    f"there are no trials: use get_experiment_name(); {_TUNE}": "get_trial_id get_trial_name",
    _TUNE: "tune",
}
"""Names of Ray, those of modules too, by the advice that is given for them."""

INSTEAD = {name: advice for advice, names in _NAMES.items() for name in names.split()}
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


def lookup(module: str, *submodules: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``.

    It imports the named modules of this package when they are used, and raises ImportError with advice for a name that
    Ray has and this package has not.

    Args:
        module: Name of the module.
        submodules: The modules in ``rankzero.compat.ray_train`` that are attributes of the module.
    """
    modules = {path.rpartition(".")[2]: path for path in submodules}

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{__package__}.{modules[name]}")
        _advice.find_spec(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
