"""``@torch_distributor``, also ``@task.torch_distributor``: a function that trains, as a TaskFlow task."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypedDict, TypeVar, Unpack, overload

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from airflow_rankzero.operators import TorchDistributorOperator

if TYPE_CHECKING:
    from airflow.sdk import DAG, TaskGroup
    from airflow.sdk.bases.decorator import Task
    from airflow.sdk.definitions.retry_policy import RetryPolicy

    from rankzero import CheckpointConfig
    from rankzero.pipeline import NumProcesses, RestartOn
    from rankzero.tracking import Tracker

P = ParamSpec("P")
R = TypeVar("R")


class _TorchDistributorDecoratedOperator(DecoratedOperator, TorchDistributorOperator):
    """The operator behind the decorator: ``train`` is the decorated function."""

    template_fields: Sequence[str] = TorchDistributorOperator.template_fields
    template_fields_renderers: ClassVar[dict[str, str]] = TorchDistributorOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = ("train", "python_callable")
    custom_operator_name = "@task.torch_distributor"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=op_kwargs,
            kwargs_to_upstream={"train": python_callable, "op_args": op_args or (), "op_kwargs": op_kwargs},
            **kwargs,
        )


@overload
def torch_distributor(python_callable: Callable[P, R]) -> Task[P, R]: ...
@overload
def torch_distributor(
    *, multiple_outputs: bool = ..., **kwargs: Unpack[TrainingArguments]
) -> Callable[[Callable[P, R]], Task[P, R]]: ...
def torch_distributor(
    python_callable: Callable[..., Any] | None = None, *, multiple_outputs: bool = False, **kwargs: Any
) -> Any:
    """Makes a task of a function that every rank calls.

    The call's arguments are the function's, templated; the task's value is what rank 0 returns, as
    `TorchDistributorOperator` describes. The ranks run outside of Airflow: a parameter that is named like a variable
    of the context must be passed, ``ds="{{ ds }}"``, else the DAG file is refused.

    Args:
        python_callable: The function, when used without parentheses.
        multiple_outputs: Push every key of a returned small dict as an XCom of its own, too.
        kwargs: Arguments of `TorchDistributorOperator`.

    Returns:
        The task, or a decorator that makes one.

    Example:
        >>> from airflow.sdk import DAG
        >>> @torch_distributor(num_processes=2)
        ... def train(lr: float) -> float:
        ...     return lr
        >>> with DAG("digits"):
        ...     loss = train(lr=1e-3)
    """
    # Explicit: Airflow would conclude True from `-> dict[...]`, and then refuse a ResultRef.
    return task_decorator_factory(
        python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_TorchDistributorDecoratedOperator,
        **kwargs,
    )


# -- the arguments, for type checkers: a misspelt one is an error before a DAG is parsed --------

Callbacks = Callable[..., Any] | Collection[Callable[..., Any]] | None


class TaskArguments(TypedDict, total=False):
    """Keyword arguments of every Airflow operator."""

    task_id: str
    owner: str
    email: str | Sequence[str] | None
    email_on_retry: bool
    email_on_failure: bool
    retries: int | None
    retry_delay: timedelta | float
    retry_exponential_backoff: float
    max_retry_delay: timedelta | float | None
    retry_policy: RetryPolicy | None
    start_date: datetime | None
    end_date: datetime | None
    depends_on_past: bool
    ignore_first_depends_on_past: bool
    wait_for_past_depends_before_skipping: bool
    wait_for_downstream: bool
    dag: DAG | None
    params: MutableMapping[str, Any] | None
    default_args: dict[str, Any] | None
    priority_weight: int
    weight_rule: Any
    queue: str
    pool: str | None
    pool_slots: int
    execution_timeout: timedelta | None
    on_execute_callback: Callbacks
    on_failure_callback: Callbacks
    on_success_callback: Callbacks
    on_retry_callback: Callbacks
    on_skipped_callback: Callbacks
    pre_execute: Callable[..., Any] | None
    post_execute: Callable[..., Any] | None
    trigger_rule: str
    resources: dict[str, Any] | None
    run_as_user: str | None
    map_index_template: str | None
    max_active_tis_per_dag: int | None
    max_active_tis_per_dagrun: int | None
    executor: str | None
    executor_config: dict[str, Any] | None
    do_xcom_push: bool
    inlets: Any
    outlets: Any
    task_group: TaskGroup | None
    doc: str | None
    doc_md: str | None
    doc_json: str | None
    doc_yaml: str | None
    doc_rst: str | None
    task_display_name: str | None
    logger_name: str | None
    allow_nested_operators: bool
    render_template_as_native_obj: bool | None


class OperatorArguments(TaskArguments, total=False):
    """Keyword arguments for the options of a run, and those of every Airflow operator."""

    # Options of a run, made by `make reference`:
    num_processes: NumProcesses | str
    use_gpu: bool | None
    processes_per_task: int | str | None
    cpus_per_process: int | None
    backend: str | None
    env: Mapping[str, str] | None
    timeout: float | str | None
    start_timeout: float | str
    hang_timeout: float | str | None
    orphan_timeout: float | None
    max_restarts: int | str
    restart_on: RestartOn
    store: str | os.PathLike[str] | None
    dataset: Any | None
    max_preemptions: int | None
    stop_grace: float
    exit_timeout: float
    ports: tuple[int, int] | None
    checkpoints: CheckpointConfig | None
    warm_start: bool
    encrypt: bool | None
    code_version: str | None
    working_dir: str | os.PathLike[str] | None
    py_files: Sequence[str | os.PathLike[str]]
    excludes: Sequence[str]
    trackers: Sequence[Tracker]
    # The end of these options.


class TrainingArguments(OperatorArguments, total=False):
    """Keyword arguments of `TorchDistributorOperator`, which describes them, and of every Airflow operator."""

    conn_id: str | None
    master: str | None
    spark_conf: Mapping[str, str] | None
    retry_user_errors: bool
    skip_on_exit_code: int | Collection[int] | None
    log_ranks: Sequence[int] | None
    deferrable: bool
