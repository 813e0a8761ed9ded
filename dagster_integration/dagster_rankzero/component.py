"""`TorchTrainingComponent`: a training as a folder with a YAML file, for the ``dg`` command."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import dagster as dg
from pydantic import Field

from dagster_rankzero.arguments import without_annotations
from dagster_rankzero.asset import torch_asset
from dagster_rankzero.compute import CONFIG, check_function
from dagster_rankzero.partitions import PARTITION_KEY, PARTITION_KEYS
from dagster_rankzero.resource import DEFAULT_RESOURCE_KEY, TorchDistributorResource

_TRAIN = '''"""Runs on every rank. What rank 0 returns is the asset's value."""


def train(lr: float = 0.1):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import rankzero.train as rt

    dist.init_process_group(rt.get_context().backend)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(10):
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rt.report({"step": step, "loss": loss.item()})
    return dict(model.module.state_dict())
'''


def _import_train(context: dg.ResolutionContext, name: str) -> Callable[..., Any]:
    """The function that ``.file.function`` (in the component's folder) or ``package.module.function`` names."""
    import importlib

    from dagster_rankzero._compat import component_folder

    module_name, _, function_name = name.rpartition(".")
    if not module_name.strip("."):
        raise dg.DagsterInvalidDefinitionError(
            f"train_fn is {name!r}; write .file.function for a file in the component's folder, or "
            "package.module.function"
        )
    package = component_folder(context) if name.startswith(".") else None
    try:
        function = getattr(importlib.import_module(module_name, package), function_name)
    except AttributeError:
        raise dg.DagsterInvalidDefinitionError(f"train_fn is {name!r}: {module_name} has no {function_name}") from None
    check_function(f"train_fn: {name}", function)
    return function  # type: ignore[no-any-return]


class TorchOp(dg.Model, dg.Resolvable):
    """How the step of a training is run.

    Attributes:
        name: Of the op; left out: made from the asset's key.
        tags: Of the op.
        pool: Concurrency pool; it counts steps, not GPUs.
        max_retries: Tries after the first one that failed.
        backfill_policy: One run for each partition, or one run for all; left out: Dagster's default.
    """

    name: str | None = None
    tags: dict[str, Any] | None = None
    pool: str | None = None
    max_retries: int = 0
    backfill_policy: Literal["multi_run", "single_run"] | None = None


class TorchTrainingScaffolder(dg.Scaffolder[Any]):
    """Writes a component that trains: ``defs.yaml`` and ``train.py``."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Writes the two files."""
        (request.target_path / "train.py").write_text(_TRAIN)
        asset = {"key": request.target_path.name, "kinds": ["pytorch"]}
        attributes = {"train_fn": ".train.train", "num_processes": 2, "kwargs": {"lr": 0.1}, "asset": asset}
        dg.scaffold_component(request, attributes)


@dg.scaffold_with(TorchTrainingScaffolder)
class TorchTrainingComponent(dg.Component, dg.Resolvable, dg.Model):
    """Distributed PyTorch training as an asset: a function that runs on every rank, whose value rank 0 returns.

    The function's parameters are inputs, as with `torch_asset`, except for those in ``kwargs``, and
    for those with a default that ``ins`` does not name.

    Example:
        .. code-block:: yaml

            type: dagster_rankzero.TorchTrainingComponent
            attributes:
              train_fn: .train.train
              num_processes: 4
              kwargs: {lr: 0.3}
              ins: {features: raw/features}
              cluster: {master: "{{ env.SPARK_MASTER }}"}
              op: {pool: gpu, max_retries: 2}
              asset: {key: models/resnet, kinds: [pytorch, spark]}
    """

    train_fn: Annotated[
        Callable[..., Any],
        dg.Resolver(
            _import_train,
            model_field_type=str,
            description="What every rank runs: .file.function in this folder, or package.module.function.",
        ),
    ]
    asset: dg.ResolvedAssetSpec
    num_processes: int | None = Field(default=None, description="World size; left out: the resource's.")
    use_gpu: bool | None = Field(default=None, description="One GPU for every rank; left out: the resource's.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Fixed arguments of the function.")
    ins: dict[str, str] = Field(
        default_factory=dict, description="Keys of the assets that its other parameters take, where they differ."
    )
    cluster: dict[str, Any] | None = Field(
        default=None,
        description="Fields of a TorchDistributorResource for this training alone: master, spark_conf, engine, store "
        "... Left out: the project's resource.",
    )
    resource_key: str = Field(default=DEFAULT_RESOURCE_KEY, description="Of the project's resource.")
    op: TorchOp = Field(default_factory=TorchOp)

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """What ``dg list components`` says."""
        return dg.ComponentTypeSpec(
            description="Distributed PyTorch training on Spark as an asset.",
            owners=["team:ml"],
            tags=["pytorch", "spark", "training"],
            produces=["asset"],
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The asset, and its resource if ``cluster`` is given."""
        name = self.op.name or self.asset.key.to_python_identifier()
        resources: dict[str, Any] = {}
        key = self.resource_key
        if self.cluster is not None:
            key = f"{name}__{DEFAULT_RESOURCE_KEY}"
            resources[key] = TorchDistributorResource(**self.cluster)
        train = _bind(self.train_fn, self.kwargs, self.ins)
        decorate = torch_asset(
            num_processes=self.num_processes, use_gpu=self.use_gpu, resource_key=key, **self._asset_arguments(train)
        )
        return dg.Definitions(assets=[decorate(train)], resources=resources)

    def _asset_arguments(self, train: Callable[..., Any]) -> dict[str, Any]:
        spec, op = self.asset, self.op
        ins = {name: dg.AssetIn(key=dg.AssetKey.from_user_string(key)) for name, key in self.ins.items()}
        if unknown := sorted(set(ins) - set(inspect.signature(train).parameters)):
            raise dg.DagsterInvalidDefinitionError(
                f"ins names {', '.join(unknown)}, but {train.__name__} has no such parameter left"
            )
        backfill = {"single_run": dg.BackfillPolicy.single_run, "multi_run": dg.BackfillPolicy.multi_run}
        arguments = {
            "key": spec.key,
            "ins": ins,
            "deps": spec.deps,
            "description": spec.description or inspect.getdoc(self.train_fn),
            "metadata": spec.metadata,
            "tags": spec.tags,
            "group_name": spec.group_name,
            "code_version": spec.code_version,
            "owners": spec.owners,
            "automation_condition": spec.automation_condition,
            "freshness_policy": spec.freshness_policy,
            "partitions_def": spec.partitions_def,
            "op_tags": op.tags,
            "pool": op.pool,
            "retry_policy": dg.RetryPolicy(max_retries=op.max_retries) if op.max_retries else None,
            "backfill_policy": backfill[op.backfill_policy]() if op.backfill_policy else None,
        }
        return {name: value for name, value in arguments.items() if value}


def _bind(function: Callable[..., Any], kwargs: Mapping[str, Any], ins: Mapping[str, str]) -> Callable[..., Any]:
    """A function of the parameters that ``kwargs`` and defaults leave over.

    Raises:
        dagster.DagsterInvalidDefinitionError: ``kwargs`` has a name that the function does not know.
    """
    signature = inspect.signature(function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_any and (unknown := sorted(set(kwargs) - set(signature.parameters))):
        takes = ", ".join(signature.parameters) or "nothing"
        raise dg.DagsterInvalidDefinitionError(
            f"kwargs has {', '.join(unknown)}, but {function.__name__} takes {takes}"
        )
    # Its annotations may be Dagster's, which executors need not have.
    bare = without_annotations(function)

    @functools.wraps(function)
    def train(**inputs: Any) -> Any:
        return bare(**kwargs, **inputs)

    del train.__wrapped__
    kept = {*ins, CONFIG, PARTITION_KEY, PARTITION_KEYS}
    rest = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in kwargs and (parameter.default is inspect.Parameter.empty or name in kept)
    ]
    train.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return train
