"""Every public name of Ray Train 2.40 and 2.60 works here, or raises an error that says what to use instead.

The names are those of ``__all__`` in Ray's own packages, and the documented names of ``ray.air.session`` and
``ray.air.config``, which have no ``__all__``.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest
from tests.conftest import ROOT

from rankzero.compat.ray_train import train
from rankzero.compat.ray_train.names import INSTEAD

HERE = "rankzero.compat.ray_train"

BOTH = {
    "ray.train": "BackendConfig Checkpoint CheckpointConfig DataConfig FailureConfig Result RunConfig ScalingConfig "
    "SyncConfig TRAIN_DATASET_KEY get_checkpoint get_context get_dataset_shard report",
    "ray.train.torch": "TorchCheckpoint TorchConfig TorchTrainer accelerate backward enable_reproducibility get_device "
    "get_devices prepare_data_loader prepare_model prepare_optimizer",
    "ray.train.lightning": "RayDDPStrategy RayDeepSpeedStrategy RayFSDPStrategy RayLightningEnvironment "
    "RayTrainReportCallback prepare_trainer",
    "ray.train.huggingface.transformers": "RayTrainReportCallback prepare_trainer",
    "ray.air": "AcquiredResources CheckpointConfig DataBatchType FailureConfig ResourceRequest Result RunConfig "
    "ScalingConfig",
    "ray.air.session": "get_checkpoint get_dataset_shard get_experiment_name get_local_rank get_local_world_size "
    "get_metadata get_node_rank get_run_id get_storage get_trial_dir get_trial_id get_trial_name get_trial_resources "
    "get_world_rank get_world_size report",
    "ray.air.config": "CheckpointConfig FailureConfig RunConfig ScalingConfig",
}
"""Names of both versions."""

ONLY_2_40 = {
    "ray.train": "TrainingIterator",
    "ray.train.torch": "TorchDetectionPredictor TorchPredictor",
    "ray.air": "DatasetConfig",
    "ray.air.config": "DatasetConfig",
}

ONLY_2_60 = {
    "ray.train": "CheckpointConsistencyMode CheckpointUploadMode ControllerError LoggingConfig NCCLHangError "
    "PreemptionError PreemptionInfo ReportedCheckpoint ReportedCheckpointStatus TrainContext TrainingFailedError "
    "UserCallback ValidationConfig ValidationFn ValidationTaskConfig WorkerGroupError get_all_reported_checkpoints "
    "get_preemption_info",
    "ray.train.collective": "barrier broadcast_from_rank_zero",
}

SUBMODULES = {
    "ray": "data init runtime_env shutdown train tune",
    "ray.train": "BaseTrainer DataParallelTrainer LightningConfigBuilder LightningTrainer TransformersTrainer "
    "backend base_trainer data_parallel_trainer horovod jax lightgbm tensorflow torch v2 xgboost",
    "ray.air": "integrations",
}
"""Modules and functions that scripts for Ray Train use beside its public names."""

MODULES = {
    "ray": HERE,
    "ray.train": HERE,
    "ray.train.torch": f"{HERE}.torch",
    "ray.train.collective": f"{HERE}.collective",
    "ray.train.lightning": f"{HERE}.lightning",
    "ray.train.huggingface.transformers": f"{HERE}.huggingface.transformers",
    "ray.air": HERE,
    "ray.air.session": f"{HERE}.session",
    "ray.air.config": f"{HERE}.config",
}

NAMES = [
    (module, name)
    for module in MODULES
    for names in (BOTH, ONLY_2_40, ONLY_2_60, SUBMODULES)
    for name in names.get(module, "").split()
]


def works(module: str, name: str) -> bool:
    return name not in INSTEAD


def defined_in(module: str) -> set[str]:
    """Returns ``__all__`` of a module that needs packages that are not installed."""
    path = Path(ROOT, "core", *module.split(".")).with_suffix(".py")
    [value] = [
        node.value for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]  # fmt: skip
    return set(ast.literal_eval(value))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_of_ray_works_or_says_what_to_use(module: str, name: str) -> None:
    here = MODULES[module]
    if here.endswith((".lightning", ".transformers")):
        assert name in defined_in(here)
        return
    line = f"from {here} import {name}"
    if works(module, name):
        exec(line, {})
        return
    with pytest.raises(ImportError, match=re.escape(f"{here} has no {name}: {INSTEAD[name]}")):
        exec(line, {})


@pytest.mark.parametrize("name", [name for name in SUBMODULES["ray.train"].split() if not works("ray.train", name)])
def test_a_module_that_is_imported_as_one_says_what_to_use(name: str) -> None:
    for package in (HERE, f"{HERE}.huggingface"):
        with pytest.raises(ImportError, match=re.escape(f"{package} has no {name}: {INSTEAD[name]}")):
            importlib.import_module(f"{package}.{name}")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module(f"{HERE}.no_such_module")


def test_the_base_of_rays_trainers_says_what_to_use() -> None:
    with pytest.raises(ImportError, match="trainer has no BaseTrainer: use TorchTrainer"):
        exec(f"from {HERE}.trainer import BaseTrainer", {})


def test_the_package_and_its_train_module_have_the_same_names() -> None:
    package = importlib.import_module(HERE)
    assert [name for name in train.__all__ if getattr(package, name) is not getattr(train, name)] == []
    for name in BOTH["ray.train"].split():
        if name in INSTEAD:
            with pytest.raises(ImportError, match=re.escape(INSTEAD[name])):
                getattr(train, name)


def test_a_name_that_ray_does_not_have_is_none_here_either() -> None:
    assert not hasattr(train, "no_such_name")


@pytest.mark.parametrize("name", ["get_metadata", "get_trial_dir", "get_trial_id", "get_trial_name"])
def test_methods_of_the_context_about_trials_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(INSTEAD[name])):
        getattr(train.get_context(), name)


def test_the_page_has_the_same_table() -> None:
    page = Path(ROOT, "docs", "migrate-ray-train.md").read_text()
    table = page.partition("## Every name")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("| `")
    ]
    working = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) == 3}
    refused = {row[0].strip("`"): row[1] for row in rows if len(row) == 2}
    assert working == {
        module: {name for of, name in NAMES if of == module and works(module, name)} for module in MODULES
    }
    assert refused == {name: INSTEAD[name] for _, name in NAMES if name in INSTEAD}


@pytest.mark.parametrize(
    "module", ["ray.train", *(name for name in MODULES if name.startswith("ray.train.")), "ray.air"]
)
def test_the_lists_are_those_of_an_installed_ray(module: str) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'ray[train]==2.60.0' in another environment, or 2.40.0")
    only = {"2.40": ONLY_2_40, "2.60": ONLY_2_60}.get(ray.__version__.rpartition(".")[0])
    if only is None:
        pytest.skip(f"Ray {ray.__version__} is neither 2.40 nor 2.60")
    listed = f"{BOTH.get(module, '')} {only.get(module, '')}".split()
    if not listed:
        pytest.skip(f"Ray {ray.__version__} has no {module}")
    if module == "ray.train.lightning":
        pytest.importorskip("lightning", reason="pip install lightning beside Ray")
    assert sorted(importlib.import_module(module).__all__) == sorted(listed)
