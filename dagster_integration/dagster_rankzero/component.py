"""`TorchTrainingComponent`: a training as a folder with a YAML file, for the ``dg`` command."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import dagster as dg
from pydantic import Field

from dagster_rankzero.compute import BOUND, CONFIG, check_function
from dagster_rankzero.decorators import torch_asset
from dagster_rankzero.inputs import PARTITION_KEY, PARTITION_KEYS
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
    """Imports the function ``.file.function`` (in the component's folder) or ``package.module.function``."""
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


class TorchRetryPolicy(dg.Model, dg.Resolvable):
    """The retry policy of a step: the arguments of `dagster.RetryPolicy`.

    Attributes:
        max_retries: Number of tries after the first one.
        delay: Seconds before the next try.
        backoff: Growth of the delay; left out: it is constant.
        jitter: Random variation of the delay; left out: none.
    """

    max_retries: int = 1
    delay: float | None = None
    backoff: Literal["linear", "exponential"] | None = None
    jitter: Literal["full", "plus_minus"] | None = None

    def build(self) -> dg.RetryPolicy:
        """Returns Dagster's policy. Raises DagsterInvalidDefinitionError for a backoff or jitter without a delay."""
        return dg.RetryPolicy(
            max_retries=self.max_retries,
            delay=self.delay,
            backoff=dg.Backoff[self.backoff.upper()] if self.backoff else None,
            jitter=dg.Jitter[self.jitter.upper()] if self.jitter else None,
        )


class TorchOp(dg.Model, dg.Resolvable):
    """Options of the step that runs a training.

    Attributes:
        tags: Tags of the op.
        pool: Concurrency pool, which counts steps, not GPUs.
        retry_policy: Retry policy of the step; left out: no retries.
        backfill_policy: One run for each partition, or one run for all; left out: Dagster's default.
    """

    tags: dict[str, Any] | None = None
    pool: str | None = None
    retry_policy: TorchRetryPolicy | None = None
    backfill_policy: Literal["multi_run", "single_run"] | None = None


class TorchCheck(dg.Model, dg.Resolvable):
    """A check of the asset, whose result rank 0 reports: ``rankzero.train.report({"check/finite": True})``.

    Attributes:
        name: Name of the check.
        description: Description of the check for the UI.
        blocking: Whether a failure stops the assets of the same run that depend on this one.
        metadata: Metadata of the check.
    """

    name: str
    description: str | None = None
    blocking: bool = False
    metadata: dict[str, Any] | None = None


class TorchTrainingScaffolder(dg.Scaffolder[Any]):
    """Writes the files of a new training component: ``defs.yaml`` and ``train.py``."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Writes ``defs.yaml`` and ``train.py`` to the requested folder."""
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
              options: {master: "{{ env.SPARK_MASTER }}", max_restarts: 1}
              op: {pool: gpu, retry_policy: {max_retries: 2, delay: 60, backoff: exponential}}
              check_specs: [{name: finite, blocking: true}]
              asset: {key: models/resnet, kinds: [pytorch, spark]}
    """

    train_fn: Annotated[
        Callable[..., Any],
        dg.Resolver(
            _import_train,
            model_field_type=str,
            description="Function that runs on every rank: .file.function in this folder, or package.module.function.",
        ),
    ]
    asset: dg.ResolvedAssetSpec
    num_processes: int | Literal["auto"] | None = Field(
        default=None, description="World size, or auto; left out: the resource's."
    )
    use_gpu: bool | None = Field(default=None, description="One GPU for every rank; left out: the resource's.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Fixed arguments of the function.")
    ins: dict[str, str] = Field(
        default_factory=dict, description="Keys of the assets that its other parameters take, where they differ."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to the resource for this training alone, by its field names: master, spark_conf, store, "
        "timeout, max_restarts ... Relative paths of working_dir and py_files begin in this folder.",
    )
    resource_key: str | None = Field(
        default=DEFAULT_RESOURCE_KEY,
        description="Of the project's TorchDistributorResource; null for one of this training's own, which options "
        "alone describe.",
    )
    io_manager_key: str | None = Field(default=None, description="Where the value goes; left out: io_manager.")
    check_specs: list[TorchCheck] = Field(
        default_factory=list, description="Checks whose results rank 0 reports under check/NAME."
    )
    op: TorchOp = Field(default_factory=TorchOp)

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Returns the description that ``dg list components`` shows."""
        return dg.ComponentTypeSpec(
            description="Distributed PyTorch training on Spark as an asset.",
            tags=["pytorch", "spark", "training"],
            produces=["asset"],
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Builds the asset, and its resource if ``resource_key`` is null."""
        key, options, resources = self.resource_key, _beside(context.path, self.options), {}
        if key is None:
            key = f"{self.asset.key.to_python_identifier()}__{DEFAULT_RESOURCE_KEY}"
            resources[key], options = TorchDistributorResource(**options), {}
        train = _bind(self.train_fn, self.kwargs, self.ins)
        decorate = torch_asset(
            num_processes=self.num_processes,
            use_gpu=self.use_gpu,
            options=options,
            resource_key=key,
            **self._asset_arguments(train),
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
        names = (
            "key deps metadata tags group_name code_version owners automation_condition freshness_policy partitions_def"
        )
        arguments = {
            **{name: getattr(spec, name) for name in names.split()},
            "ins": ins,
            "description": spec.description or inspect.getdoc(self.train_fn),
            "io_manager_key": self.io_manager_key,
            "check_specs": [dg.AssetCheckSpec(asset=spec.key, **dict(check)) for check in self.check_specs],
            "op_tags": op.tags,
            "pool": op.pool,
            "retry_policy": op.retry_policy.build() if op.retry_policy else None,
            "backfill_policy": backfill[op.backfill_policy]() if op.backfill_policy else None,
        }
        return {name: value for name, value in arguments.items() if value}


def _beside(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, with relative paths of shipped code resolved in the component's folder."""
    folder = path.parent if path.is_file() else path

    def absolute(given: Any) -> Any:
        return os.path.normpath(folder / os.path.expanduser(given)) if isinstance(given, str) else given

    found = dict(options)
    if "working_dir" in found:
        found["working_dir"] = absolute(found["working_dir"])
    if isinstance(found.get("py_files"), (list, tuple)):
        found["py_files"] = [absolute(name) for name in found["py_files"]]
    return found


def _bind(function: Callable[..., Any], kwargs: Mapping[str, Any], ins: Mapping[str, str]) -> Callable[..., Any]:
    """Returns a function of the parameters without a value in ``kwargs`` or a default.

    Raises:
        dagster.DagsterInvalidDefinitionError: ``kwargs`` has a name that is not a parameter of the function.
    """
    signature = inspect.signature(function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_any and (unknown := sorted(set(kwargs) - set(signature.parameters))):
        takes = ", ".join(signature.parameters) or "nothing"
        raise dg.DagsterInvalidDefinitionError(
            f"kwargs has {', '.join(unknown)}, but {function.__name__} takes {takes}"
        )

    @functools.wraps(function)
    def train(**inputs: Any) -> Any:
        return function(**kwargs, **inputs)

    kept = {*ins, CONFIG, PARTITION_KEY, PARTITION_KEYS}
    rest = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in kwargs and (parameter.default is inspect.Parameter.empty or name in kept)
    ]
    train.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    # The run gets the values as its arguments, so that trackers and reports show them.
    setattr(train, BOUND, (function, kwargs))
    return train
