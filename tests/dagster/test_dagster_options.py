"""The options of the resource, of `rankzero.Launcher` and of Airflow's operator: names, defaults, their way down."""

import dataclasses
import json
from pathlib import Path

import dagster as dg
import pytest
from pydantic import ValidationError

from dagster_rankzero import TorchDistributorResource
from rankzero import CheckpointConfig, Launcher

OF_THE_LAUNCHER_ALONE = {
    "labels": "the integration's own notes",
    "run_id": "made of Dagster run and step: every try finds the same run",
}
OF_DAGSTER_ALONE = {
    "min_processes": "a field of Dagster has one type, so the launcher's pair of sizes is two fields",
    "master": "the engine",
    "deploy_mode": "the engine",
    "spark_conf": "the engine",
    "name": "of a pipeline's step, whose run is found by it",
    "observation_interval": "Dagster's own",
    "by_reference": "Dagster's own",
    "retry_user_errors": "of a pipeline, as Airflow's operator has it",
    "log_ranks": "of whoever follows, as Airflow's operator has it",
}
OTHER_THAN_THE_LAUNCHER = {
    "restart_on": "a list, as YAML has it",
    "py_files": "a list, as YAML has it",
    "trackers": "a list, as those are",
    "engine": "a name, for YAML and the launchpad; a pipeline's trainings run on Spark",
    "env": "Dagster has no empty value for a mapping but an empty one",
}


def defaults_of_the_resource() -> dict[str, object]:
    resource = TorchDistributorResource()
    plain = {name: getattr(resource, name) for name in TorchDistributorResource.model_fields}
    return {**plain, "checkpoints": dict(resource.checkpoints)}


def test_names_and_defaults_are_those_of_the_launcher() -> None:
    launcher = {name: getattr(Launcher(), name) for name in Launcher.__dataclass_fields__ if name != "_"}
    launcher["checkpoints"] = dataclasses.asdict(launcher["checkpoints"])
    resource = defaults_of_the_resource()
    assert set(launcher) - set(resource) == set(OF_THE_LAUNCHER_ALONE)
    assert set(resource) - set(launcher) == set(OF_DAGSTER_ALONE)
    shared = set(launcher) & set(resource)
    assert {name for name in shared if launcher[name] != resource[name]} == set(OTHER_THAN_THE_LAUNCHER)


def test_they_reach_the_run(torch_distributor: TorchDistributorResource, tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(None, "loss", "max")
    configured = torch_distributor.options(
        num_processes=1, max_preemptions=3, ports=(20000, 29999), checkpoints=checkpoints
    )

    @dg.asset
    def trained(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(max_restarts=1).run(context, lambda: 1)

    dg.materialize([trained], resources={"torch_distributor": configured})
    (job,) = (json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/submissions/0.json"))
    assert job["checkpoints"] == {"num_to_keep": None, "metric": "loss", "mode": "max"}
    assert (job["max_restarts"], job["max_preemptions"], job["ports"]) == (1, 3, [20000, 29999])
    assert configured.options(checkpoints=job["checkpoints"])._launcher().checkpoints == checkpoints
    assert configured.options(warm_start=False)._launcher().warm_start is False


def test_a_wrong_way_to_keep_checkpoints_is_refused_when_defined() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="no field 'num_to_kep' \\(did you mean 'num_to_keep'"):
        TorchDistributorResource(checkpoints={"num_to_kep": 1})
    with pytest.raises(ValidationError, match="checkpoints.mode"):
        TorchDistributorResource(checkpoints={"mode": "best"})


def test_an_elastic_world_is_two_fields_and_a_pair_in_python() -> None:
    pair = TorchDistributorResource(num_processes=(2, 8))  # type: ignore[arg-type]
    assert (pair.num_processes, pair.min_processes) == (8, 2)
    assert pair._launcher().num_processes == (2, 8)
    assert TorchDistributorResource(num_processes=8, min_processes=2)._launcher().num_processes == (2, 8)
    assert pair.options(max_restarts=1)._launcher().num_processes == (2, 8)
    # One number is one number, whatever the resource says.
    assert pair.options(num_processes=4)._launcher().num_processes == 4
    assert TorchDistributorResource().options(num_processes=(1, 3))._launcher().num_processes == (1, 3)


def test_a_world_of_what_there_is_is_a_word_in_python_and_null_in_the_launchpad() -> None:
    @dg.op(out=dg.Out(str))
    def world(torch_distributor: TorchDistributorResource) -> str:
        return str(torch_distributor._launcher().num_processes)

    @dg.job(resource_defs={"torch_distributor": TorchDistributorResource.configure_at_launch()})
    def launch() -> None:
        world()

    config = {"resources": {"torch_distributor": {"config": {"num_processes": None}}}}
    assert launch.execute_in_process(config).output_for_node("world") == "auto"
    assert TorchDistributorResource(num_processes="auto")._launcher().num_processes == "auto"  # type: ignore[arg-type]
    assert (
        TorchDistributorResource(num_processes=(2, 8)).options(num_processes="auto")._launcher().num_processes == "auto"
    )  # type: ignore[arg-type]


def test_exceptions_to_restart_on_are_kept_by_name() -> None:
    resource = TorchDistributorResource(max_restarts=1, restart_on=["CUDA error", ConnectionError])  # type: ignore[list-item]
    assert resource.restart_on == ["CUDA error", "ConnectionError"]
    assert resource._launcher().restart_on == ("CUDA error", "ConnectionError")
    assert TorchDistributorResource(restart_on=ValidationError).restart_on == [  # type: ignore[arg-type]
        f"{ValidationError.__module__}.ValidationError"
    ]
