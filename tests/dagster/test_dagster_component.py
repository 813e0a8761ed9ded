"""`TorchTrainingComponent`: a training in a folder with a YAML file, as ``dg`` loads, checks and launches it."""

import os
import shutil
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox
from tests.conftest import ROOT
from tests.dagster.dagster_events import value_of
from tests.runs import folder_of

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, TorchTrainingComponent
from rankzero import RunHandle

TRAIN = """
import dagster as dg

from .shapes import double


class Settings(dg.Config):
    bias: int = 1


def train(features: dict, lr: float, config: Settings, factor: int = 1):
    \"\"\"Trains.\"\"\"
    import sys

    imported = [name for name in sys.modules if name.startswith("dagster")]
    return {"w": double(features["x"]) * lr * factor + config.bias, "dagster": imported}
"""


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    with create_defs_folder_sandbox() as made:
        yield made


def component(sandbox: DefsFolderSandbox, **attributes: object) -> Path:
    folder = sandbox.scaffold_component(
        TorchTrainingComponent,
        defs_path="training",
        defs_yaml_contents={"type": "dagster_rankzero.TorchTrainingComponent", "attributes": attributes},
    )
    (folder / "train.py").write_text(TRAIN)
    (folder / "shapes.py").write_text("def double(x):\n    return 2 * x\n")
    return folder


@dg.asset(key=["raw", "features"])
def features() -> dict[str, float]:
    return {"x": 3.0}


def test_a_folder_becomes_an_asset_whose_helpers_travel_and_dagster_does_not(
    sandbox: DefsFolderSandbox, resources: dict[str, object]
) -> None:
    folder = component(
        sandbox,
        train_fn=".train.train",
        kwargs={"lr": 0.5},
        ins={"features": "raw/features"},
        num_processes=1,
        op={
            "pool": "gpu",
            "tags": {"team": "vision"},
            "retry_policy": {"max_retries": 2, "delay": 30, "backoff": "exponential", "jitter": "full"},
        },
        asset={"key": "models/digits", "kinds": ["pytorch"], "group_name": "training", "owners": ["team:vision"]},
    )
    with sandbox.load_component_and_build_defs(folder) as (_, defs):
        whole = dg.Definitions.merge(defs, dg.Definitions(assets=[features], resources=resources))
        trained = whole.resolve_assets_def(dg.AssetKey(["models", "digits"]))
        spec = trained.get_asset_spec()
        assert (spec.group_name, spec.kinds, spec.owners) == ("training", {"pytorch"}, ["team:vision"])
        assert spec.description == "Trains."
        assert (trained.op.pool, trained.op.tags["team"]) == ("gpu", "vision")
        policy = dg.RetryPolicy(max_retries=2, delay=30, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.FULL)
        assert trained.op.retry_policy == policy
        result = whole.resolve_implicit_global_asset_job_def().execute_in_process()
        assert value_of(result, "models__digits") == {"w": 4.0, "dagster": []}
    (made,) = result.asset_materializations_for_node("models__digits")
    params = RunHandle.attach(str(made.metadata["run_directory"].value)).params
    assert (params["lr"], params["factor"]) == (0.5, 1)


def test_annotations_may_be_strings(sandbox: DefsFolderSandbox) -> None:
    folder = component(sandbox, train_fn=".train.train", kwargs={"lr": 0.5}, asset={"key": "model"})
    (folder / "train.py").write_text(f"from __future__ import annotations\n{TRAIN}")
    with sandbox.load_component_and_build_defs(folder) as (_, defs):
        (trained,) = defs.assets or ()
        assert isinstance(trained, dg.AssetsDefinition)
        assert set(trained.op.config_schema.config_type.fields) == {"bias"}


def test_options_change_fields_of_the_projects_resource(
    sandbox: DefsFolderSandbox, torch_distributor: TorchDistributorResource, tmp_path: Path
) -> None:
    folder = component(
        sandbox,
        train_fn="tests.dagster.trained_component.report_and_greet",
        options={"num_processes": 1, "env": {"GREETING": "hello"}},
        io_manager_key="shelf",
        check_specs=[{"name": "finite", "blocking": True}, {"name": "told"}],
        asset={"key": "greeting", "deps": ["calendar"]},
    )
    resources = {"torch_distributor": torch_distributor, "shelf": RankZeroIOManager(base_path=str(tmp_path / "shelf"))}
    with sandbox.load_component_and_build_defs(folder) as (_, defs):
        whole = dg.Definitions.merge(defs, dg.Definitions(resources=resources))
        result = whole.resolve_implicit_global_asset_job_def().execute_in_process()
    assert value_of(result, "greeting") == {"size": 1, "greeting": "hello"}
    # The project's store, and the IO manager that the file names.
    assert list((tmp_path / "runs").iterdir())
    assert (tmp_path / "shelf" / "greeting" / "rankzero.json").exists()
    assert {check.check_name: check.passed for check in result.get_asset_check_evaluations()} == {
        "finite": True,
        "told": False,
    }


def test_a_resource_of_its_own(sandbox: DefsFolderSandbox, tmp_path: Path) -> None:
    folder = component(
        sandbox,
        train_fn="tests.dagster.trained_component.world_size",
        num_processes=2,
        resource_key=None,
        options={
            "engine": "local",
            "store": str(tmp_path / "runs"),
            "working_dir": ".",
            "py_files": ["shapes.py"],
        },
        asset={"key": "size"},
    )
    with sandbox.load_component_and_build_defs(folder) as (_, defs):
        whole = dg.Definitions.merge(
            defs, dg.Definitions(resources={"io_manager": RankZeroIOManager(base_path=str(tmp_path / "assets"))})
        )
        job = whole.resolve_implicit_global_asset_job_def()
        assert value_of(job.execute_in_process(), "size") == 2
    (run,) = (tmp_path / "runs").iterdir()
    # Relative paths begin in the component's folder.
    with zipfile.ZipFile(folder_of(run) / "code.zip") as sent:
        assert {"working_dir/train.py", "py_files/shapes.py"} <= set(sent.namelist())


def test_a_project_without_the_resource_is_told_which(sandbox: DefsFolderSandbox) -> None:
    folder = component(sandbox, train_fn="tests.dagster.trained_component.world_size", asset={"key": "size"})
    with (
        sandbox.load_component_and_build_defs(folder) as (_, defs),
        pytest.raises(dg.DagsterInvalidDefinitionError, match="torch_distributor"),
    ):
        defs.resolve_implicit_global_asset_job_def()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"train_fn": ".train.missing"}, "missing"),
        ({"train_fn": "train"}, ".file.function"),
        ({"kwargs": {"learning_rate": 1}}, "learning_rate"),
        ({"ins": {"labels": "raw/labels"}}, "labels"),
        ({"num_processes": "two"}, "num_processes"),
        ({"world_size": 2}, "world_size"),
        ({"options": {"mastr": "local[2]"}}, "no field 'mastr' (did you mean 'master'?)"),
        ({"options": {"mastr": "local[2]"}, "resource_key": None}, "no field 'mastr' (did you mean 'master'?)"),
        ({"options": {"num_processes": "two"}}, "num_processes"),
        ({"op": {"pol": "gpus"}}, "TorchOpModel.pol at"),
        ({"op": {"retry_policy": {"max_retires": 2}}}, "TorchRetryPolicyModel.max_retires at"),
        ({"op": {"retry_policy": {"backoff": "linear"}}}, "delay"),
        ({"check_specs": [{"nam": "finite"}]}, ".0.nam at"),
        ({"asset": {"key": "model", "kind": "pytorch"}}, ".kind at"),
    ],
)
def test_mistakes_in_the_yaml_are_named(wrong: dict[str, object], named: str, sandbox: DefsFolderSandbox) -> None:
    right = {"train_fn": ".train.train", "asset": {"key": "model"}}
    folder = component(sandbox, **{**right, **wrong})
    with pytest.raises(Exception) as raised, sandbox.load_component_and_build_defs(folder):
        pass
    assert named in "".join(traceback.format_exception(raised.value))


def dg_command(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("dg")), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.soak
def test_dg_scaffolds_checks_lists_and_launches_in_the_example_project(tmp_path: Path) -> None:
    folder = tmp_path / "component_project"
    shutil.copytree(ROOT / "example_dags" / "dagster" / "component_project", folder)
    path = os.pathsep.join([str(folder / "src"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "DG_CLI_CONFIG": str(tmp_path / "dg.toml"), "NO_COLOR": "1"}
    environment |= {"RANKZERO_STORE": str(tmp_path / "runs"), "WITHOUT_SPARK": "1"}
    dg_command(environment, folder, "scaffold", "defs", "dagster_rankzero.TorchTrainingComponent", "scaffolded")
    # Checks the YAML files too.
    dg_command(environment, folder, "check", "defs")
    listed = dg_command(environment, folder, "list", "defs", "--json")
    assert all(f'"{key}"' in listed for key in ("models/digits", "raw/scans", "scaffolded"))
    dg_command(environment, folder, "launch", "--assets", "raw/scans,models/digits,scaffolded")
    with dg.DagsterInstance.get() as instance:
        for key in ("models/digits", "scaffolded"):
            event = instance.get_latest_materialization_event(dg.AssetKey.from_user_string(key))
            shown = event.asset_materialization.metadata
            assert (shown["world_size"].value, shown["format"].value) == (2, "torch")
            assert "loss_curve" in shown
