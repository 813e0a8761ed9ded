"""`torch_asset`: an asset whose function runs on every rank."""

from collections.abc import Callable, Mapping
from typing import Any, overload

import dagster as dg

from dagster_rankzero.arguments.partitions import take_single
from dagster_rankzero.decorators.compute import build_compute, collect_options, with_reported_checks, with_resource
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY
from rankzero.pipeline import NumProcesses


@overload
def torch_asset(train: Callable[..., Any], /) -> dg.AssetsDefinition: ...
@overload
def torch_asset(
    *,
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]: ...
def torch_asset(
    train: Callable[..., Any] | None = None,
    /,
    *,
    num_processes: NumProcesses | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    resource_key: str = DEFAULT_RESOURCE_KEY,
    **asset_arguments: Any,
) -> dg.AssetsDefinition | Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Makes an asset of a function that runs on every rank; rank 0's return value is the asset's value.

    The function's parameters are the asset's inputs, as with ``@dg.asset``. An input from a
    `RankZeroIOManager` is opened inside the ranks and not loaded by the step. An input from another IO
    manager is loaded by the step and sent with the job. Three parameters are special:

    * ``config``, annotated with a `dagster.Config` class: the ranks get a plain namespace with the
      same attributes, since executors may not have Dagster installed.
    * ``partition_key``: the key of the partition, a string, ``"a|b"`` for two dimensions.
    * ``partition_keys``: the list of them, for `dagster.BackfillPolicy.single_run`; the function
      returns a dict with one value for each.

    The result of a check in ``check_specs`` is the value that rank 0 reports under its name:
    ``rankzero.train.report({"check/finite": True})``.

    Args:
        train: The function. It gets no Dagster context.
        num_processes: World size, the smallest and the largest, or ``"auto"``; None: the resource's.
        use_gpu: Whether every rank gets a GPU; None: the resource's value.
        options: More changes to the resource for this asset, by its field names.
        resource_key: Key of the `TorchDistributorResource`.
        asset_arguments: Everything that ``@dg.asset`` takes: ``ins``, ``deps``, ``partitions_def``,
            ``backfill_policy``, ``retry_policy``, ``pool``, ``op_tags``, ``kinds``, ``tags``, ``owners``,
            ``code_version``, ``check_specs``, ``automation_condition``, ``io_manager_key`` ...

    Returns:
        The asset, or a decorator that makes it.

    Raises:
        dagster.DagsterInvalidDefinitionError: a parameter or argument cannot be used.

    Example:
        >>> @torch_asset(num_processes=4, kinds={"pytorch"}, pool="gpu")
        ... def model(features):
        ...     import torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     return {"rows": len(features)}
    """
    changes = collect_options(options, num_processes=num_processes, use_gpu=use_gpu)

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        finish = with_reported_checks if asset_arguments.get("check_specs") else take_single
        context = dg.AssetExecutionContext
        compute = build_compute("torch_asset", function, resource_key, changes, context, asset_arguments, finish)
        decorated = dg.asset(**with_resource(asset_arguments, resource_key))(compute)
        assert isinstance(decorated, dg.AssetsDefinition)
        return decorated

    return decorate if train is None else decorate(train)
