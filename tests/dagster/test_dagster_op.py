"""`torch_distributor_op`: an op from a function or a script."""

import runpy
from pathlib import Path

import dagster as dg
import pytest
import torch
from tests.dagster.dagster_events import failure_of, value_of

import rankzero.train as rt
from dagster_rankzero import torch_distributor_op


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


def test_arguments_for_a_function_are_refused_when_defined() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="inputs"):
        torch_distributor_op(lambda scale: scale, args=[1])


def test_a_hook_that_trains_is_refused_before_it_does(resources: dict[str, object], tmp_path: Path) -> None:
    @dg.success_hook(required_resource_keys={"torch_distributor"})
    def publish(context: dg.HookContext) -> None:
        context.resources.torch_distributor.run(context, len, "abc")

    @dg.op
    def plain() -> int:
        return 1

    @dg.job(resource_defs=resources, hooks={publish})  # type: ignore[arg-type]
    def hooked() -> None:
        plain()

    result = hooked.execute_in_process()
    (event,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.HOOK_ERRORED]
    assert "a hook cannot train" in str(event.event_specific_data)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("as_tuple", [False, True])
def test_an_op_with_several_outputs_gives_each_its_part_of_rank_zeros_value(
    resources: dict[str, object], as_tuple: bool
) -> None:
    @torch_distributor_op(out={"model": dg.Out(), "loss": dg.Out()}, options={"by_reference": True})
    def fit() -> object:
        return ([1.0, 2.0], 0.5) if as_tuple else {"loss": 0.5, "model": [1.0, 2.0]}

    result = executed(resources, fit)
    assert result.output_for_node("fit", "model") == [1.0, 2.0]
    assert result.output_for_node("fit", "loss") == 0.5
    outputs = [e for e in result.all_events if e.event_type_value == "STEP_OUTPUT"]
    assert all("run_id" in event.step_output_data.metadata for event in outputs)


def test_an_op_whose_value_lacks_an_output_says_what_to_return(resources: dict[str, object]) -> None:
    @torch_distributor_op(out={"model": dg.Out(), "loss": dg.Out(), "notes": dg.Out(is_required=False)})
    def fit() -> dict[str, int]:
        return {"model": 1}

    result = executed(resources, fit, raise_on_error=False)
    assert "return a dict with the keys model, loss, notes" in failure_of(result, "fit")[0]


def test_an_output_of_type_nothing_has_no_part_in_rank_zeros_value(resources: dict[str, object]) -> None:
    @torch_distributor_op(out={"done": dg.Out(dg.Nothing), "loss": dg.Out()})
    def fit() -> dict[str, int]:
        return {"loss": 2}

    assert executed(resources, fit).output_for_node("fit", "loss") == 2


def test_the_outputs_of_a_graph_have_the_parts_of_its_partitions_and_only_those_that_are_selected(
    resources: dict[str, object], instance: dg.DagsterInstance
) -> None:
    @torch_distributor_op(out={name: dg.Out(is_required=False) for name in ("model", "loss")})
    def fit(partition_keys: list[str]) -> dict[str, dict[str, str]]:
        return {name: {key: f"{name} {key}" for key in partition_keys} for name in ("model", "loss")}

    @dg.graph_multi_asset(
        outs={"model": dg.AssetOut(), "loss": dg.AssetOut()},
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
        can_subset=True,
    )
    def trained() -> dict[str, object]:
        model, loss = fit()
        return {"model": model, "loss": loss}

    defs = dg.Definitions([trained], resources=resources)
    dg.materialize(
        [trained], selection=dg.AssetSelection.keys("model"), partition_key="a", resources=resources, instance=instance
    )
    assert defs.load_asset_value("model", partition_key="a", instance=instance) == "model a"
    assert instance.get_materialized_partitions(dg.AssetKey("loss")) == set()


@pytest.mark.parametrize("out", [dg.DynamicOut(), {"items": dg.DynamicOut()}])
def test_dynamic_outputs_are_refused_when_the_op_is_made(out: object) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="makes no dynamic outputs"):
        torch_distributor_op("train.py", out=out)
