"""What a step of an asset that users write themselves gets: a result that names its asset, or a refusal in time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from tests.dagster.dagster_events import failure_of, metadata_of, retries_of, value_of

from dagster_rankzero import TorchDistributorResource

Context = dg.AssetExecutionContext
Body = Callable[[Context, TorchDistributorResource], object]


def train() -> dict[str, int]:
    return {"model": 1, "metrics": 2}


def returned(context: Context, torch_distributor: TorchDistributorResource) -> object:
    return torch_distributor.run(context, train)


def yielded(context: Context, torch_distributor: TorchDistributorResource) -> Iterator[object]:
    yield torch_distributor.run(context, train)


def unannotated(body: Body) -> Body:
    """Annotated with what a body gives, the outputs would have its type."""
    del body.__annotations__["return"]
    return body


BODIES = [unannotated(body) for body in (returned, yielded)]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("selection", [None, ["model"]])
def test_several_assets_are_refused_before_the_training(
    body: Body, selection: list[str] | None, resources: dict[str, object], tmp_path: Path
) -> None:
    multi = dg.multi_asset(
        outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()},
        name="multi",
        can_subset=True,
        retry_policy=dg.RetryPolicy(max_retries=1),
    )(body)
    result = dg.materialize([multi], selection=selection, resources=resources, raise_on_error=False)
    description, _ = failure_of(result, "multi")
    assert "the assets model, metrics" in description or "the assets metrics, model" in description
    assert "torch_multi_asset" in description
    assert retries_of(result, "multi") == 0
    assert not (tmp_path / "runs").exists()


def test_several_assets_can_be_made_of_an_outputs_value(resources: dict[str, object]) -> None:
    @dg.multi_asset(outs={"model": dg.AssetOut(), "metrics": dg.AssetOut()})
    def multi(context: Context, torch_distributor: TorchDistributorResource):
        output = torch_distributor.run(context.op_execution_context, train)
        for name, value in output.value.items():
            yield dg.MaterializeResult(asset_key=name, value=value, metadata=output.metadata)

    result = dg.materialize([multi], resources=resources)
    assert value_of(result, "multi", "metrics") == 2
    assert metadata_of(result, "model")["world_size"] == 1


@pytest.mark.parametrize("body", BODIES)
def test_an_asset_without_a_value_gets_the_metadata(body: Body, resources: dict[str, object]) -> None:
    multi = dg.multi_asset(specs=[dg.AssetSpec("model")], name="multi")(body)
    result = dg.materialize([multi], resources=resources)
    shown = metadata_of(result, "model")
    assert shown["world_size"] == 1
    assert Path(str(shown["run_directory"])).is_dir()


def test_an_op_inside_of_a_graph_asset_passes_its_value_on(resources: dict[str, object]) -> None:
    @dg.op
    def inner(context: Context, torch_distributor: TorchDistributorResource):
        return torch_distributor.run(context, train)

    @dg.op
    def doubled(trained):
        return trained["metrics"] * 2

    @dg.graph_asset
    def metrics():
        return doubled(inner())

    result = dg.materialize([metrics], resources={"torch_distributor": resources["torch_distributor"]})
    assert [event.asset_key.to_user_string() for event in result.get_asset_materialization_events()] == ["metrics"]
    assert value_of(result, "metrics") == 4
