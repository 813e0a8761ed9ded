"""All uses of the private interfaces of Dagster 1.13. Only this module must change when they change."""

import difflib
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import dagster as dg
from dagster._config.field_utils import env_var_to_config_dict, is_dagster_env_var
from dagster._core.errors import DagsterInvalidPropertyError, DagsterRunNotFoundError
from dagster._core.execution.plan.outputs import StepOutputHandle
from dagster._core.execution.stats import StepEventStatus
from dagster._core.storage.tags import MAX_RETRIES_TAG, RETRY_NUMBER_TAG, WILL_RETRY_TAG
from dagster._core.types.dagster_type import resolve_dagster_type
from dagster._utils.warnings import disable_dagster_warnings
from dagster.components.core.context import ComponentDeclLoadContext
from pydantic import BaseModel, ConfigDict, model_validator


def set_data_version(context: dg.OutputContext, version: str) -> None:
    """Sets the data version of the asset being stored, unless its step has set one; ignores an op's output."""
    step = context._step_context
    if step is not None and context.has_asset_key:
        step.set_data_version(context.asset_key, dg.DataVersion(version))


def component_folder(context: dg.ResolutionContext) -> str:
    """Returns the Python package of the folder whose component is being loaded."""
    load_context = ComponentDeclLoadContext.from_resolution_context(context)
    path = load_context.path
    return load_context.defs_relative_module_name(path.parent if path.is_file() else path)


dagster_type_of = resolve_dagster_type

IN_PROCESS, MULTIPROCESS, DELEGATED = EXECUTORS = "in process", "multiprocess", "delegated"
"""The process that runs a step: that of its run, a child of that, or a separate one such as a pod."""


def variable_of(value: Any) -> str | None:
    """Returns the name of the environment variable of a `dagster.EnvVar`; None for any other value."""
    return str(env_var_to_config_dict(value)["env"]) if is_dagster_env_var(value) else None


def check_fields(owner: type[BaseModel], given: Iterable[str]) -> None:
    """Raises DagsterInvalidDefinitionError if one of the names is not a field of the class, with suggestions."""
    known = [field.alias or name for name, field in owner.model_fields.items()]
    for name in given:
        if name not in known:
            likely = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
            meant = f" (did you mean {likely[0]!r}?)" if likely else ""
            raise dg.DagsterInvalidDefinitionError(
                f"{owner.__name__} has no field {name!r}{meant}; its fields are {', '.join(known)}"
            )


class KnownFields(dg.Config):
    """A configuration class whose unknown fields raise DagsterInvalidDefinitionError: Dagster ignores them."""

    # Errors reach Dagster's event log, and a value may be a password or contain a token.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_fields(cls, given)
        return given


def facts_of(context: Any) -> tuple[dg.DagsterRun, dg.DagsterInstance, str, int, dg.RetryPolicy | None, str] | None:
    """Returns Dagster's facts about the try of a step that a context belongs to; None outside of a step, as in a test.

    They are the Dagster run; its instance; the step's key; the number of earlier tries in this run; the step's retry
    policy, None also if the executor does not retry; and one of `EXECUTORS`.
    """
    if (step := _step_of(context)) is None:
        return None
    policy = None if step.retry_mode.disabled else step.op_retry_policy
    number = step.previous_attempt_count
    return step.dagster_run, step.instance, step.step.key, number, policy, _executor_of(step)


def _executor_of(step: Any) -> str:
    if not step.retry_mode.deferred:
        # Such an executor retries a step in its own process.
        return IN_PROCESS
    own = {dg.multiprocess_executor.name, dg.multi_or_in_process_executor.name}
    return MULTIPROCESS if step.job_def.executor_def.name in own else DELEGATED


def _step_of(context: Any) -> Any:
    op_context = getattr(context, "op_execution_context", context)
    return getattr(op_context, "_step_execution_context", None)


_names: WeakKeyDictionary[Any, dict[str, object]] = WeakKeyDictionary()
# The names of the trainings of each try of a step.


def claim_name(context: Any, name: str) -> bool:
    """Returns True for the first training with a name in the try of the step that a context belongs to."""
    training = object()
    return _names.setdefault(_step_of(context), {}).setdefault(name, training) is training


def has_stored(instance: dg.DagsterInstance, run_id: str, key: str) -> bool:
    """Returns True if the outputs of a step are stored: it has succeeded, or a blocking check of it has failed."""
    stats = instance.get_run_step_stats(run_id, [key])
    if any(found.step_key == key and found.status is StepEventStatus.SUCCESS for found in stats):
        return True
    logs = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    events = [entry.dagster_event for entry in logs if entry.dagster_event and entry.dagster_event.step_key == key]
    checks = [event.asset_check_evaluation_data for event in events]
    return any(it.blocking and not it.passed and it.severity is dg.AssetCheckSeverity.ERROR for it in checks)


def signal_of(interrupt: BaseException) -> int | None:
    """Returns the signal that has interrupted a step, from the frame of the handler that raised; None if unknown."""
    numbers = (frame.f_locals.get("_signo") for frame, _ in traceback.walk_tb(interrupt.__traceback__))
    return next((number for number in numbers if isinstance(number, int)), None)


def name_of(context: Any) -> str:
    """Returns the name of a context's op; ``"direct"`` for a context that a test created."""
    op_context = getattr(context, "op_execution_context", context)
    try:
        return str(op_context.op_def.name)
    except DagsterInvalidPropertyError:
        return "direct"


class OutputFacts(NamedTuple):
    """Dagster's facts about an output of a step; the output of an op has no asset key."""

    name: str
    asset_key: dg.AssetKey | None
    dagster_type: dg.DagsterType
    is_dynamic: bool


def outputs_of(context: Any) -> list[OutputFacts]:
    """Returns the selected outputs of a context's step, without checks; empty outside of a step."""
    if (step := _step_of(context)) is None:
        return []
    found = [each for each in step.step.step_outputs if each.name in step.selected_output_names]
    types = {each.name: step.op_def.output_def_named(each.name).dagster_type for each in found}
    facts = [(each.name, each.properties) for each in found if each.properties.asset_check_key is None]
    return [OutputFacts(name, known.asset_key, types[name], known.is_dynamic) for name, known in facts]


def with_partitions(spec: dg.AssetCheckSpec, partitions: Any) -> dg.AssetCheckSpec:
    """Returns a check with the partitions of its asset, which Dagster 1.13 has as a preview, without its warning."""
    with disable_dagster_warnings():
        return spec._replace(partitions_def=partitions)


def evaluation_of(
    context: Any, result: dg.AssetCheckResult, spec: dg.AssetCheckSpec, partition: str | None
) -> dg.AssetCheckEvaluation:
    """Returns the evaluation of a check, of a partition if there is one, from the result that a check would return."""
    step = _step_of(context)
    if partition is None:
        return result._replace(asset_key=spec.asset_key, check_name=spec.name).to_asset_check_evaluation(step)
    target = result._get_partitioned_target_materialization_data(step, spec.asset_key, partition)
    # The evaluation is planned for the partitions of the run.
    own = partition if spec.partitions_def and (context.has_partition_key or context.has_partition_key_range) else None
    passed, metadata, severity, told = result.passed, result.metadata, result.severity, result.description
    return dg.AssetCheckEvaluation(
        spec.asset_key, spec.name, passed, metadata, target, severity, told, spec.blocking, own
    )


def output_of_check(context: Any, key: dg.AssetCheckKey) -> str:
    """Returns the name of the output of a context's step that stands for a check."""
    return str(_step_of(context).job_def.asset_layer.get_op_output_name(key))


def io_manager_of(context: Any, output: str) -> object:
    """Returns the IO manager of an output of a context's step."""
    step = _step_of(context)
    return step.get_io_manager(StepOutputHandle(step.step.key, output))


def is_automatic_retry(run: dg.DagsterRun) -> bool:
    """Returns True for a run that Dagster has started automatically after the failure of its parent."""
    return RETRY_NUMBER_TAG in run.tags and run.parent_run_id is not None


def may_be_retried(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Returns True if Dagster would retry or resume a run that failed now."""
    if instance.run_will_resume(run.run_id):
        return True
    try:
        limit = int(run.tags.get(MAX_RETRIES_TAG, instance.run_retries_max_retries))
    except ValueError:
        return False
    # A run that was not launched from a code location cannot be launched again.
    if not instance.run_retries_enabled or limit <= 0 or run.remote_job_origin is None:
        return False
    try:
        group = instance.get_run_group(run.run_id)
    except DagsterRunNotFoundError:
        return False
    return group is not None and len(list(group[1])) <= limit


def is_retried(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Returns True for a run that has failed and that Dagster retries by itself, or may: it decides a moment later."""
    decided = run.tags.get(WILL_RETRY_TAG, str(instance.run_retries_enabled))
    return run.status is dg.DagsterRunStatus.FAILURE and decided.lower() == "true"
