"""`torch_distributor_op`: an op from a function or a script."""

import runpy
from pathlib import Path

import dagster as dg
import pytest
import torch
from tests.dagster.dagster_events import value_of

import rankzero.train as rt
from dagster_rankzero import torch_asset, torch_distributor_op


class Config(dg.Config):
    power: int = 2


@torch_distributor_op(num_processes=3, tags={"team": "vision"})
def train(scale: float, data: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Trains."""
    return {"w": data["x"] * scale**config.power * rt.get_context().world_size}


@dg.op
def load() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2)}


@dg.op
def add(weights: dict[str, torch.Tensor]) -> float:
    return weights["w"].sum().item()


def scaled_by(number: float, *, by: int = 2) -> float:
    """Scales.

    Args:
        number: The number to scale.
    """
    return number * by


scaled = torch_distributor_op(scaled_by)


def executed(
    resources: dict[str, object], node: dg.OpDefinition, before: dg.OpDefinition | None = None, **more: bool
) -> dg.ExecuteInProcessResult:
    """Executes a job of one op, and of one before it."""

    @dg.job(resource_defs=resources)
    def pipeline() -> None:
        node(before()) if before else node()

    return pipeline.execute_in_process(**more)


def test_an_op_takes_inputs_and_configuration_and_gives_rank_zeros_value(resources: dict[str, object]) -> None:
    @dg.job(resource_defs=resources)
    def pipeline() -> None:
        add(train(data=load()))

    run_config = {"ops": {"train": {"inputs": {"scale": 2.0}, "config": {"power": 3}}}}
    result = pipeline.execute_in_process(run_config=run_config)
    assert value_of(result, "add") == 2 * 8.0 * 3
    (event,) = [e for e in result.all_events if e.step_key == "train" and e.event_type_value == "STEP_OUTPUT"]
    assert event.step_output_data.metadata["world_size"].value == 3
    assert train.tags["team"] == "vision"
    assert train.description == "Trains."


def test_inputs_are_given_by_position_and_take_defaults_and_descriptions(resources: dict[str, object]) -> None:
    @dg.op
    def one() -> float:
        return 1.5

    @dg.graph_asset
    def total() -> float:
        return scaled(scaled(one()))

    assert dg.materialize([total], resources=resources).output_for_node("total").load() == 6.0
    assert scaled.ins["number"].description == "The number to scale."
    with dg.build_op_context(resources=resources) as context:
        assert scaled(context, 1.5, 4).value == 6.0
    with dg.build_asset_context(resources=resources) as context:
        assert torch_asset(scaled_by)(context, 1.5, 4).value == 6.0


def test_a_relative_script_begins_at_the_file_that_makes_the_op(
    resources: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fit.py").write_text("import rankzero.train as rt\nrt.set_result('beside')\n")
    (tmp_path / "defs.py").write_text(
        "from dagster_rankzero import torch_distributor_op\nfit = torch_distributor_op('fit.py')\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fit = runpy.run_path(str(tmp_path / "defs.py"))["fit"]
    assert value_of(executed(resources, fit), "fit") == "beside"
    assert fit.description == "Runs fit.py on every rank."


def test_a_script_is_an_op_that_can_wait_for_others(resources: dict[str, object], tmp_path: Path) -> None:
    script = tmp_path / "fit-model.py"
    script.write_text("import sys\nimport rankzero.train as rt\nrt.set_result(sys.argv[1:])\n")
    fit = torch_distributor_op(script, args=["--epochs", "3"], ins={"start": dg.In(dg.Nothing)})
    result = executed(resources, fit, load)
    assert value_of(result, "fit_model") == ["--epochs", "3"]


def test_a_command_is_an_op(resources: dict[str, object], tmp_path: Path) -> None:
    touch = torch_distributor_op(["touch"], args=[tmp_path / "touched-by-${local_rank}"])
    assert value_of(executed(resources, touch), "touch") is None
    assert (tmp_path / "touched-by-0").exists()


def test_a_reference_to_a_function_is_an_op(resources: dict[str, object]) -> None:
    join = torch_distributor_op("posixpath:join", args=["a", "b"], name="joined")
    assert value_of(executed(resources, join), "joined") == "a/b"


def test_several_outputs_are_refused_when_the_op_is_made() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="makes one output"):
        torch_distributor_op("train.py", out={"model": dg.Out(), "loss": dg.Out()})


def test_arguments_of_a_program_are_refused_for_a_function() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="args are for a program"):
        torch_distributor_op(print, args=["--epochs", "3"])
