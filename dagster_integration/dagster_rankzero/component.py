"""`TorchTrainingComponent`: a training as a folder with a YAML file, for the ``dg`` command."""

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import dagster as dg
from pydantic import Field

from dagster_rankzero._compat import component_folder
from dagster_rankzero.decorators import build_asset, collect_changes
from dagster_rankzero.inputs import CONFIG, PARTITION_KEY, PARTITION_KEYS, check_function
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
    """The retry policy of a step: the arguments of `dagster.RetryPolicy`."""

    max_retries: int = 1
    delay: float | None = None
    backoff: Literal["linear", "exponential"] | None = None
    jitter: Literal["full", "plus_minus"] | None = None

    def build(self) -> dg.RetryPolicy:
        """Returns Dagster's policy. Raises DagsterInvalidDefinitionError for a backoff or jitter without a delay."""
        backoff = dg.Backoff[self.backoff.upper()] if self.backoff else None
        jitter = dg.Jitter[self.jitter.upper()] if self.jitter else None
        return dg.RetryPolicy(max_retries=self.max_retries, delay=self.delay, backoff=backoff, jitter=jitter)


class TorchOp(dg.Model, dg.Resolvable):
    """Options of the step that runs a training; a pool counts steps, not GPUs."""

    tags: dict[str, Any] | None = None
    pool: str | None = None
    retry_policy: TorchRetryPolicy | None = None
    backfill_policy: Literal["multi_run", "single_run"] | None = None


class TorchCheck(dg.Model, dg.Resolvable):
    """A check of the asset, whose result rank 0 reports: ``rankzero.train.report({"check/finite": True})``."""

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
        dg.Resolver(_import_train, model_field_type=str, description=".file.function, or package.module.function."),
    ]
    asset: dg.ResolvedAssetSpec
    num_processes: int | Literal["auto"] | None = Field(None, description="World size; left out: the resource's.")
    kwargs: dict[str, Any] = Field({}, description="Fixed arguments of the function.")
    ins: dict[str, str] = Field({}, description="Keys of the assets that other parameters take, where they differ.")
    options: dict[str, Any] = Field(
        {}, description="Changes to the resource; relative paths of working_dir and py_files begin in this folder."
    )
    resource_key: str | None = Field(
        DEFAULT_RESOURCE_KEY, description="The project's resource; null for one that options alone describe."
    )
    io_manager_key: str | None = Field(None, description="Where the value goes; left out: io_manager.")
    check_specs: list[TorchCheck] = Field([], description="Checks whose results rank 0 reports under check/NAME.")
    op: TorchOp = Field(default_factory=TorchOp)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Builds the asset, and its resource if ``resource_key`` is null."""
        options, resources = _beside(context.path, self.options), {}
        if (key := self.resource_key) is None:
            key = f"{self.asset.key.to_python_identifier()}__{DEFAULT_RESOURCE_KEY}"
            resources[key], options = TorchDistributorResource(**options), {}
        changes = collect_changes(options, num_processes=self.num_processes)
        names = self._inputs()
        asset = build_asset(self.train_fn, changes, key, self._asset_arguments(), self.kwargs, names)
        return dg.Definitions(assets=[asset], resources=resources)

    def _inputs(self) -> set[str]:
        """Returns the parameters of the function that are not fixed, and have no default or are named in ``ins``."""
        parameters = inspect.signature(self.train_fn).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        free = set(parameters) - set(self.kwargs)
        wrong = {"ins": set(self.ins) - free, "kwargs": set() if takes_any else set(self.kwargs) - set(parameters)}
        for field, names in wrong.items():
            if names:
                takes = f"{self.train_fn.__name__} takes {', '.join(parameters) or 'nothing'}"
                raise dg.DagsterInvalidDefinitionError(f"{field} has {', '.join(sorted(names))}, but {takes}")
        always = {*self.ins, CONFIG, PARTITION_KEY, PARTITION_KEYS}
        return {name for name, p in parameters.items() if p.default is inspect.Parameter.empty or name in always}

    def _asset_arguments(self) -> dict[str, Any]:
        spec, op, names = self.asset, self.op, "key deps metadata tags group_name code_version owners partitions_def"
        arguments = {
            **{name: getattr(spec, name) for name in [*names.split(), "automation_condition", "freshness_policy"]},
            "ins": {name: dg.AssetIn(key=dg.AssetKey.from_user_string(key)) for name, key in self.ins.items()},
            "description": spec.description or inspect.getdoc(self.train_fn),
            "io_manager_key": self.io_manager_key,
            "check_specs": [dg.AssetCheckSpec(asset=spec.key, **dict(check)) for check in self.check_specs],
            "op_tags": op.tags,
            "pool": op.pool,
            "retry_policy": op.retry_policy and op.retry_policy.build(),
            "backfill_policy": op.backfill_policy and getattr(dg.BackfillPolicy, op.backfill_policy)(),
        }
        return {name: value for name, value in arguments.items() if value}


def _beside(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, with relative paths of shipped code resolved in the component's folder."""
    folder = path.parent if path.is_file() else path

    def absolute(given: Any) -> Any:
        return os.path.normpath(folder / os.path.expanduser(given)) if isinstance(given, str) else given

    found = dict(options)
    for name in {"working_dir", "py_files"}.intersection(options):
        given = options[name]
        found[name] = [absolute(each) for each in given] if isinstance(given, (list, tuple)) else absolute(given)
    return found
